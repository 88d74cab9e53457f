"""The APIs that clients speak. Each is a Dialect: it reads Requests, and writes Answers."""

from titan_tree.serve.dialects.chat import Chat
from titan_tree.serve.dialects.messages import Messages
from titan_tree.serve.dialects.responses import Responses
from titan_tree.serve.request import Dialect

# By what follows /v1/ in the path of a request.
DIALECTS: dict[str, Dialect] = {"chat/completions": Chat(), "messages": Messages(), "responses": Responses()}

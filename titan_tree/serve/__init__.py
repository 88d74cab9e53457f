"""serve: a server for agents. It samples from a model, and records the tokens that the model read and wrote.

    body of a request -> dialect -> Request -> Session -> prompt as token ids -> sampler -> Answer -> dialect

No module here imports torch.

settings.py       the table [serve]
request.py        Request, Answer, and Dialect: an API that clients speak
dialects/         the APIs of OpenAI and Anthropic
turn_text.py      the text of a turn as a message with thoughts and calls of tools
session.py        Session: the calls of one rollout, as a tree of token ids; their forks and paths
session_files.py  sessions as files, and their rows
agent_server.py   AgentServer: the HTTP server; only it imports aiohttp
process.py        runs agents' programs, and leaves none of their processes behind
tinker/           Tinker's API: training and sampling for loops of clients
supervisor.py     the process between a run and a program
"""

"""Messages, and parts of the rows of several formats."""

ASK = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "!"}
RULES = {"role": "system", "content": "s"}
NUL = None
SAYS = {"type": "message", "role": "assistant", "content": "!"}


def chat(*messages, **fields):
    return {"messages": list(messages), **fields}


def request(*messages):
    return {"request": {"messages": list(messages)}}

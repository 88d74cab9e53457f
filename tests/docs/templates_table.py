"""Writes into docs/templates.md what 20 published chat templates do, as the package trl 1.16 ships them.

python -m tests.docs.templates_table
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.support.tokenizer_files import published_template
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.vocabulary import AddedToken, byte_vocabulary
from titan_tree.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
TABLE = re.compile(r"(?<=<!-- templates: begin -->\n).*(?=<!-- templates: end -->)", re.DOTALL)
DEEPSEEK = "<｜end▁of▁sentence｜>"  # noqa: RUF001
TEMPLATES = {  # model -> name of the template, and the end of a text, which some templates write
    "Command R7B": ("cohere2", "<|END_OF_TURN_TOKEN|>"),
    "DeepSeek-R1-Distill": ("deepseek_r1_distill", DEEPSEEK),
    "DeepSeek-V3": ("deepseekv3", DEEPSEEK),
    "Gemma 2": ("gemma", "<eos>"),
    "Gemma 3": ("gemma3", "<eos>"),
    "Gemma 4": ("gemma4_v5", "<eos>"),
    "GLM-4.5": ("glm4moe", "<|endoftext|>"),
    "gpt-oss": ("gptoss", "<|return|>"),
    "LFM2": ("lfm2", "<|im_end|>"),
    "LFM2.5": ("lfm2_2_5_v2", "<|im_end|>"),
    "Llama 3": ("llama3", "<|eot_id|>"),
    "Llama 3.1": ("llama3_1", "<|eot_id|>"),
    "Llama 3.2": ("llama3_2", "<|eot_id|>"),
    "Nemotron 3 Nano": ("nemotron_3_nano", "<|im_end|>"),
    "Phi-3": ("phi3", "<|endoftext|>"),
    "Qwen2.5": ("qwen2_5", "<|im_end|>"),
    "Qwen3": ("qwen3", "<|im_end|>"),
    "Qwen3-2507": ("qwen3_instruct_2507", "<|im_end|>"),
    "Qwen3.5": ("qwen3_5_think", "<|im_end|>"),
    "Qwen3.8": ("qwen3_8", "<|im_end|>"),
}
CONTROL = re.compile(
    r"<\|[^|<>\n ]+\|>|<\uff5c[^\uff5c<>\n]+\uff5c>|<(?:start|end)_of_turn>|<\|?[a-z_]+\|>|<\|[a-z_]+>"
)
HEAD = (
    "| model | earlier thoughts | system | tools | calls | an answer, a call ends with | arguments | date |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
SYSTEM, ASK = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}
ANSWER, THOUGHT = {"role": "assistant", "content": "A"}, {"reasoning_content": "Hm"}
FUNCTION = {"name": "f", "arguments": '{"key":"value"}'}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "R"}
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "k"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}


def table() -> str:
    """Returns the table. It needs trl."""
    return HEAD + "".join(_row(model, *TEMPLATES[model]) for model in TEMPLATES)


def _row(model: str, name: str, end: str) -> str:
    file = published_template(name)
    control = dict.fromkeys([*CONTROL.findall(file.read_text()), end])
    added = tuple(AddedToken(token, 300 + index) for index, token in enumerate(control))
    template = ChatTemplate.load(file, {"bos_token": "", "eos_token": end})
    tokenizer = TreeTokenizer(dataclasses.replace(byte_vocabulary(), added=added), template)
    variables = {"date": "2025-12-31"} if "date" in tokenizer.template_variables else {}

    def texts(*messages: dict[str, object], tools: object = None) -> list[tuple[str, str]]:
        """Returns (all text, trained text) of each sample, or [] if the template is refused."""
        for thought in ({}, THOUGHT):  # some templates need thoughts to continue their own prompt
            given = [m | thought if m["role"] == "assistant" else m for m in messages]
            try:
                paths = tokenizer.samples(given, tools, **variables)
            except UserError:
                continue
            return [(tokenizer.decode(p.tokens), tokenizer.decode(p.tokens[p.loss_mask > 0])) for p in paths]
        return []

    def shown(found: object) -> str:
        return "shown" if found else "refused"

    first, second = (ANSWER | {"reasoning_content": thought} for thought in ("One.", "Two."))
    try:
        last = tokenizer.samples([ASK, first, ASK, second], **variables)[-1]
        thoughts = "kept" if "One." in tokenizer.decode(last.tokens) else "dropped"
    except UserError:
        thoughts = "all refused"
    answers, calls = texts(ASK, ANSWER), texts(ASK, CALL, RESULT, ANSWER, tools=[TOOL])
    ends = [f"`{CONTROL.findall(found[0][1])[-1]}`" for found in (answers, calls) if found]
    as_written = calls and FUNCTION["arguments"] in calls[0][1]
    cells = [
        model,
        thoughts,
        shown(texts(SYSTEM, ASK, ANSWER)),
        shown(texts(ASK, ANSWER, tools=[TOOL])),
        shown(calls),
        ", ".join(dict.fromkeys(ends)) or "refused",
        "" if not calls else "as written" if as_written else "printed anew",
        "`date`" if variables else "`date_string`" if "date_string" in tokenizer.template_variables else "",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
    print(f"wrote {PAGE}")

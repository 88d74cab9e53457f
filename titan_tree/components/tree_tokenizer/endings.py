"""How an answer of a model ended. The mark of an API, an engine or a framework decides what is trained.

finished    the model ended the answer itself; its end-of-turn token is trained
continued   the answer goes on in the next message; all of the message but its end-of-turn token is trained
cut off     the model did not end it: a limit, a stop string or an error did; its text is trained, and no end
filtered    a filter ended or replaced it; nothing is trained, unless ``weight`` of the message is 1
"""

from __future__ import annotations

from typing import Literal

from titan_tree.errors import UserError, shorten

Ending = Literal["finished", "continued", "cut off", "filtered"]

# Marks of OpenAI, Anthropic, Gemini, Bedrock, Cohere, Mistral, vLLM, SGLang, TGI, slime, SkyRL and verifiers.
_MARKS: dict[Ending, str] = {
    "finished": "stop eos eos_token end_turn tool_calls tool_call tool_use function_call complete completed",
    "continued": "continued",
    "cut off": "length max_tokens max_output_tokens max_length model_length model_context_window_exceeded "
    "stop_sequence pause_turn incomplete in_progress truncated abort aborted cancelled canceled error failed "
    "pending context_length agent_timeout insufficient_system_resource",
    "filtered": "content_filter content_filtered refusal safety recitation language blocklist spii "
    "prohibited_content guardrail_intervened error_toxic",
}
_ENDINGS = {mark: ending for ending, marks in _MARKS.items() for mark in marks.split()}


def ending(mark: object, where: str) -> Ending:
    """Returns how an answer with this mark ended. Case does not matter; None stands for "finished".

    Args:
        mark: such as ``finish_reason`` of OpenAI, or ``stop_reason`` of Anthropic.
        where: the field, for the error.

    Raises:
        UserError: an unknown mark.
    """
    if mark is None:
        return "finished"
    known = _ENDINGS.get(mark.lower()) if isinstance(mark, str) else None
    if known is None:
        raise UserError(
            f"{where}: expected a known mark, got {shorten(mark)}; give stop (the model ended the answer), "
            "length (it was cut off) or content_filter (it was filtered)"
        )
    return known

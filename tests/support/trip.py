"""A conversation with parallel tool calls, and the texts that chat templates make of its parts."""

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"description": "<°C> & 'so'"}}}
TRIP = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo and Rome?"},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "Two calls.",
        "tool_calls": [
            {"name": "weather", "arguments": {"city": "Oslo"}},
            {"name": "weather", "arguments": {"city": "Røma <b>"}},
        ],
    },
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "tool", "name": "weather", "content": "sun"},
    {"role": "assistant", "content": "Rain, sun.", "reasoning_content": "Sum up."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "Welcome."},
]
CALLS = """<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Røma <b>"}}
</tool_call><|im_end|>
"""
RESULTS = """<|im_start|>user
<tool_response>
rain
</tool_response>
<tool_response>
sun
</tool_response><|im_end|>
"""
TOOLS_TAIL = """
</tools>

For each function call, return a json object with function name and arguments \
within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
"""
TOOLS_JSON = (
    """{"type": "function", "function": {"name": "weather", "parameters": {"description": "<°C> & 'so'"}}}"""
)
QWEN3_TOOLS = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{TOOLS_JSON}{TOOLS_TAIL}"""
QUESTION = "<|im_start|>user\nWeather in Oslo and Rome?<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"

"""TreeTokenizer turns text and conversations into token ids and training samples.

tokenizer.py         TreeTokenizer, which combines the modules below
vocabulary.py        reads vocabularies: a Hugging Face tokenizer.json, a .tiktoken rank file, or plain bytes
hf_files.py          the files of a tokenizer in a Hugging Face folder
encoders.py          encodes and decodes text with a vocabulary, by tiktoken or by the library tokenizers
messages.py          checks conversations and converts them into one form
endings.py           how an answer of a model ended, which decides what of it is trained
tool_calls.py        keeps arguments as the model wrote them, and puts results in the order of their calls
templates.py         renders conversations with Jinja chat templates; chatml and qwen3 are built in
probes.py            finds what a template leaves out, and where it ends answers
template_process.py  starts and ends the process in which templates run
sandbox.py           the program of that process: a Jinja environment, and limits of the operating system
samples.py           encodes the prompts of a conversation and cuts them into training samples
"""

from titan_tree.components.tree_tokenizer.tokenizer import TreeTokenizer

__all__ = ["TreeTokenizer"]

"""TreeTokenizer turns text and conversations into token ids and training samples.

tokenizer.py       TreeTokenizer, which combines the modules below
vocabulary.py      reads vocabularies: a Hugging Face tokenizer.json, a .tiktoken rank file, or plain bytes
encoders.py        encodes and decodes text with a vocabulary, by tiktoken or by the library tokenizers
messages.py        checks conversations and converts them into one form
templates.py       renders conversations with Jinja chat templates; chatml.jinja and qwen3.jinja are built in
sandbox.py         the Jinja environment in which templates run, and limits.py, its limits on time and memory
samples.py         encodes the prompts of a conversation and cuts them into training samples
"""

from titan_tree.components.tree_tokenizer.tokenizer import TreeTokenizer

__all__ = ["TreeTokenizer"]

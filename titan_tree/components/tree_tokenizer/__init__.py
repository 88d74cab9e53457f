"""TreeTokenizer: text and conversations -> token ids and training samples.

vocabulary.py   files -> tables: a Hugging Face tokenizer.json, a .tiktoken rank file, plain bytes
bpe.py          tables -> tiktoken: encode and decode
templates.py    Jinja chat templates; chatml.jinja and qwen3.jinja are built in
samples.py      a conversation -> TokenPaths, by rendering
tokenizer.py    TreeTokenizer, the four together
"""

from titan_tree.components.tree_tokenizer.tokenizer import TreeTokenizer

__all__ = ["TreeTokenizer"]

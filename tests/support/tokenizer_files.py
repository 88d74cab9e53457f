"""Small tokenizers whose pipelines are not byte-level BPE, and the published chat templates."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<a>", "<a>b", "x<a>yy", "<<")
LINES = [
    *("The quick brown fox jumps over the lazy dog, don't it?", "def f(x):", "    return x + 1", ""),
    *("user says hello there", "assistant: four is two and two", "日本語のテキスト。", "café naïve 😀"),
] * 8


def unigram() -> Tokenizer:
    """Returns a tokenizer as T5's: Unigram, and a mark before the first word of a text.

    Its vocabulary has the control tokens as words.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", *CONTROL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Returns a tokenizer as Phi-3's: BPE that spells unknown characters as bytes.

    A mark stands before every text between control tokens, and some of these take white space beside them.
    """
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *fallback], show_progress=False, limit_alphabet=90
    )
    tokenizer.train_from_iterator(LINES, trainer)
    options = {"<|im_end|>": {"rstrip": True}, "<<": {"lstrip": True}, "<|im_start|>": {"rstrip": True}}
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, **options.get(token, {})) for token in CONTROL]
    )
    tokenizer.add_tokens([AddedToken("word", single_word=True, normalized=False), AddedToken("ﬁx")])
    return tokenizer


PIPELINES = {"unigram": unigram, "byte fallback": byte_fallback}


def save(tokenizer: Tokenizer, folder: Path) -> dict:
    """Writes tokenizer.json into the folder, and returns its content."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return json.loads((folder / "tokenizer.json").read_text())


def published_template(name: str) -> Path:
    """Returns the file of a published chat template, which the package trl has. Skips the test without it."""
    trl = find_spec("trl")  # not imported, which takes seconds
    if trl is None or trl.origin is None:
        pytest.skip("needs trl")
    return Path(trl.origin).with_name("chat_templates") / f"{name}.jinja"

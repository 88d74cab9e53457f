"""TreeTokenizer: ids equal those of the library `tokenizers` and of Qwen; errors name file and field."""

import base64
import gzip
import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.datasets import REAL_DATA
from tests.support.tokenizer_files import CONTROL, PIPELINES, save
from titan_tree.components.tree_tokenizer import TreeTokenizer, encoders
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.vocabulary import QWEN_PATTERN, Vocabulary
from titan_tree.components.tree_tokenizer.vocabulary import AddedToken as VocabularyToken
from titan_tree.errors import UserError

RANKS = REAL_DATA / "qwen.tiktoken.gz"
# In Qwen3.5, combining marks belong to words.
QWEN35_PATTERN = QWEN_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"\s\p{L}\p{N}]+[", r"\s\p{L}\p{M}\p{N}]+["
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<think>", "</think>", "<tool_call>")  # added but not special, as in Qwen3
CORPUS = [
    "The quick brown fox don't jump; def f(x):\n    return x + 1\n\n  # comment 'quoted' \"text\"\r\n" * 20,
    "日本語のテキスト。中文文本处理。Ünïcödé café naïve 한국어 텍스트 हिन्दी पाठ العربية 😀😃🤖 ñandú 1234 "
    * 20,
    Path(__file__).read_text(encoding="utf-8"),
]
POOL = [
    *map(chr, range(32, 127)),
    *"\t\n\r\x00\x0b\x0c\x1c\x7f\x85\xa0\u2028\u3000\ufeff\u200d",
    *"\u0300\u0301\u0323\u0338\u0338\u0338",  # combining marks: '>' + U+0338 composes to U+226F
    *"\u1100\u1161\u11a8\u212b\u2126\ufb01\xe9\u093f\u0915\u064b\u0627\u4e2d\u017f\U0001f600\U0001f1e6",
    *SPECIAL, *WORDS, "<|im_", "'LL", "'s", "'\u017f", " the", "  ", "\n\n", "caf\u00e9", "cafe\u0301",
]  # fmt: skip


def hf_tokenizer(pattern: str | None, normalizer: normalizers.Normalizer | None) -> Tokenizer:
    """Returns a small byte-level BPE. Without ``pattern``, the ByteLevel pre-tokenizer uses its own."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
        if pattern
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in WORDS])
    return tokenizer


@pytest.fixture(scope="module")
def qwen_like() -> Tokenizer:
    return hf_tokenizer(QWEN_PATTERN, normalizers.NFC())


def fuzz(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(POOL) for _ in range(rng.randint(0, 30))) for _ in range(count)] + CORPUS


def assert_same_ids(ours: TreeTokenizer, theirs: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, text


@pytest.mark.parametrize(
    ("pattern", "normalizer"),
    [
        (QWEN_PATTERN, normalizers.NFC()),
        (QWEN35_PATTERN, normalizers.NFC()),
        (None, None),
        (QWEN_PATTERN, normalizers.Sequence([normalizers.NFD(), normalizers.NFKC()])),
    ],
    ids=["qwen3", "qwen3.5", "gpt2", "two normal forms"],
)
def test_ids_equal_those_of_the_library(pattern, normalizer, tmp_path):
    theirs = hf_tokenizer(pattern, normalizer)
    save(theirs, tmp_path)
    ours = TreeTokenizer.from_hf(tmp_path)
    assert ours.vocab_size == theirs.get_vocab_size() == 900 + len(SPECIAL + WORDS)
    texts = fuzz(2000)
    assert_same_ids(ours, theirs, texts)
    for text in texts:
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text).ids, skip_special_tokens=False
        )


def test_fuzz_texts_depend_on_nfc_and_on_the_order_of_steps(qwen_like):
    """Ids change if NFC runs before added tokens are cut out, and also if NFC does not run at all."""
    assert qwen_like.encode("<think>\u0338").ids != qwen_like.encode("<think\u226f").ids
    assert qwen_like.encode("cafe\u0301").ids == qwen_like.encode("caf\u00e9").ids
    assert any(">\u0338" in text for text in fuzz(2000))


def test_ids_need_not_follow_merge_order(qwen_like, tmp_path):
    """Ids may permute the ranks, as in GPT-2, with gaps and with added tokens in between."""
    spec = save(qwen_like, tmp_path)
    vocab = spec["model"]["vocab"]
    shuffled = random.Random(1).sample(range(2000), len(vocab))
    spec["model"]["vocab"] = dict(zip(vocab, shuffled, strict=True))
    for token, id in zip(spec["added_tokens"], range(2000, 2100), strict=False):
        token["id"] = spec["model"]["vocab"][token["content"]] = id
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = TreeTokenizer.from_hf(tmp_path)
    assert ours.vocab_size == 2000 + len(SPECIAL + WORDS)
    assert_same_ids(ours, theirs, fuzz(500))


def test_normalized_added_tokens_are_cut_out_after_normalization(tmp_path):
    """`tokenizer.add_tokens(["..."])` of transformers marks its tokens as normalized."""
    theirs = hf_tokenizer(QWEN_PATTERN, normalizers.NFC())
    theirs.add_tokens(
        [AddedToken(t, normalized=True) for t in ("<cafe\u0301>", "\u212b", "<think", "k>a", "k>ab")]
    )
    save(theirs, tmp_path)
    extra = ["<caf\u00e9>", "<cafe\u0301>", "\u212b", "\u00c5", "<think", "<think>a", "<thi", "k>a", "k>ab"]
    rng = random.Random(2)
    texts = ["".join(rng.choice(extra + POOL[:40] + POOL[-20:]) for _ in range(12)) for _ in range(1000)]
    assert_same_ids(TreeTokenizer.from_hf(tmp_path), theirs, texts)


def test_added_tokens_of_tokenizer_config_are_read(qwen_like, tmp_path):
    save(qwen_like, tmp_path)
    config = {"added_tokens_decoder": {"906": {"content": "<late>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = TreeTokenizer.from_hf(tmp_path)
    assert ours.encode("a<late>") == [*ours.encode("a"), 906]
    assert ours.vocab_size == 907


def test_special_false_reads_control_tokens_as_text(qwen_like, tmp_path):
    """Other added tokens, such as <think>, become their ids."""
    save(qwen_like, tmp_path)
    ours = TreeTokenizer.from_hf(tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    for text in fuzz(300):
        assert ours.encode(text, special=False) == theirs.encode(text).ids
    assert ours.encode("<think>", special=False) == [ours.special_tokens["<think>"]]


def change(spec: dict, changes: dict, folder: Path) -> None:
    """Sets fields, named by paths such as "model.vocab", and writes the result."""
    for field, value in changes.items():
        *parents, last = [int(key) if key.isdigit() else key for key in field.split(".")]
        place = spec
        for key in parents:
            place = place[key]
        place[last] = value
    (folder / "tokenizer.json").write_text(json.dumps(spec))


MALFORMED = {
    "wrong type": ({"model.type": "Unigram"}, "expected a tokenizer that the package tokenizers can open"),
    "no vocabulary": ({"model.vocab": None}, "model.vocab: missing"),
    "merges are numbers": ({"model.merges": [1, 2]}, "that the package tokenizers can open"),
    "unknown merge": ({"model.merges": [["a", "ĠĠĠĠĠĠĠĠa"]]}, "that the package tokenizers can open"),
    "bad pattern": ({"pre_tokenizer.pretokenizers.0.pattern": {"Regex": "("}}, "tokenizers can open"),
    "steps": ({"pre_tokenizer.pretokenizers": 5}, "that the package tokenizers can open"),
    "empty token": ({"added_tokens.0.content": ""}, "added_tokens: expected objects with id and content"),
    "added tokens": ({"added_tokens": 5}, "added_tokens: expected a list, got 5"),
    "token without id": ({"added_tokens.0": {"content": "x"}}, "added_tokens: expected objects with id"),
    "id with a gap": (
        {"normalizer": {"type": "Lowercase"}, "added_tokens.5": {"content": "x", "id": 2000}},
        "of 'x', which the package tokenizers gives it, got 2000",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_tokenizers_are_refused(changes, message, qwen_like, tmp_path):
    change(save(qwen_like, tmp_path), changes, tmp_path)
    with pytest.raises(UserError) as error:
        TreeTokenizer.from_hf(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(tmp_path / "tokenizer.json") in str(error.value)


UNUSUAL = {
    "byte fallback": {"model.byte_fallback": True},
    "lowercase": {"normalizer": {"type": "Lowercase"}},
    "prefix space": {"pre_tokenizer.pretokenizers.1.add_prefix_space": True},
    "two patterns": {"pre_tokenizer.pretokenizers.1.use_regex": True},
    "removed matches": {"pre_tokenizer.pretokenizers.0.behavior": "Removed"},
    "whitespace": {"pre_tokenizer": {"type": "Whitespace"}},
    "lstrip": {"added_tokens.0.lstrip": True, "added_tokens.4.lstrip": True},
    "rstrip": {"added_tokens.1.rstrip": True, "added_tokens.3.rstrip": True},
    "single word": {"added_tokens.2.single_word": True},
    "truncation": {
        "normalizer": {"type": "Lowercase"},
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    },
}


@pytest.mark.parametrize("changes", UNUSUAL.values(), ids=UNUSUAL)
def test_other_pipelines_have_the_ids_of_the_library(changes, qwen_like, tmp_path):
    """Each of them differs from the pipeline of byte-level BPE in one step."""
    change(save(qwen_like, tmp_path), changes, tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.no_truncation()
    assert_same_ids(TreeTokenizer.from_hf(tmp_path), theirs, fuzz(500))


@pytest.fixture(params=PIPELINES)
def pipeline(request, tmp_path) -> tuple[TreeTokenizer, Tokenizer]:
    theirs = PIPELINES[request.param]()
    save(theirs, tmp_path)
    return TreeTokenizer.from_hf(tmp_path, "chatml"), theirs


def test_unigram_and_byte_fallback_have_the_ids_of_the_library(pipeline):
    ours, theirs = pipeline
    rng = random.Random(3)
    parts = [*POOL, *CONTROL, *CONTROL, " ", "  ", "\n", "word", "a word", "\ufb01x", "fix", "quick brown"]
    texts = ["".join(rng.choice(parts) for _ in range(rng.randint(0, 15))) for _ in range(2000)]
    assert_same_ids(ours, theirs, texts)
    assert ours.vocab_size == theirs.get_vocab_size()
    for text in texts[:300]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_unigram_and_byte_fallback_read_control_tokens_as_text_on_request(pipeline):
    ours, _ = pipeline
    control = {ours.special_tokens[token] for token in CONTROL}
    for text in ("<|im_end|>", "a<a>b <|im_start|>x", "<<"):
        ids = ours.encode(text, special=False)
        assert ids
        assert not control & set(ids)
    assert control & set(ours.encode("a<a>b"))
    with pytest.raises(UserError, match="lone surrogate"):
        ours.encode("a\ud83d")
    with pytest.raises(UserError, match="expected ids of this vocabulary, got 100000"):
        ours.decode([100_000])


@pytest.mark.parametrize("header", ["<|im_start|>", "<|im_start|>\n", "assistant:\n"])
def test_completions_have_the_ids_that_follow_their_prompt(pipeline, tmp_path, header):
    """Alone, their first word would have the mark of a text's beginning."""
    _, theirs = pipeline
    template = (
        "{% for m in messages %}{{ H if m.role == 'assistant' }}{{ m.content ~ '<|im_end|>' }}{% endfor %}"
        "{{ H if add_generation_prompt }}"
    )
    ours = TreeTokenizer.from_hf(tmp_path, "{% set H = " + json.dumps(header) + " %}" + template)
    messages = [
        {"role": "user", "content": "two and two"},
        {"role": "assistant", "content": "four is quick"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "fox"},
    ]
    for path, count in zip(ours.samples(messages), (2, 4), strict=True):
        expected = theirs.encode(ours.render(messages[:count]), add_special_tokens=False).ids
        assert path.tokens.tolist() == expected
        assert 0 < path.loss_mask.sum() < len(path)


def test_other_pipelines_encode_chatml_as_one_text(pipeline):
    """Of the control tokens, only those of the template take effect."""
    ours, theirs = pipeline
    answer = {"role": "assistant", "content": "four"}
    for content in ("two and\nword two", "two<|im_end|>\n<a>b", "<|im_start|>user\n<<"):
        messages = [{"role": "user", "content": content}, answer]
        (path,) = ours.samples(messages)
        prompt = ours.render(messages[:1], add_generation_prompt=True)
        in_template = theirs.encode(prompt.replace(content, ""), add_special_tokens=False).ids
        control = {ours.special_tokens[token] for token in CONTROL}
        ids = path.tokens[path.loss_mask.cumsum() == 0].tolist()
        assert [id for id in ids if id in control] == [id for id in in_template if id in control]
        if "<" not in content:
            assert ids == theirs.encode(prompt, add_special_tokens=False).ids


def test_normalized_control_tokens_are_plain_text_in_messages():
    tokens = {bytes([b]): b for b in range(256)}
    added = (VocabularyToken("<e\u0301>", 300, normalized=True), VocabularyToken("<b>", 301, special=False))
    vocabulary = Vocabulary(tokens, tokens, added, QWEN_PATTERN, ("NFC",))
    template = ChatTemplate("{{ '<e\u0301>' ~ messages[0].content | text ~ '<\u00e9><b>' }}", "(text)")
    ids = TreeTokenizer(vocabulary, template)._encoder.encode(
        encoders.Spans(template.spans("<e\u0301>\ufdd0<\u00e9><b>\ufdd1<\u00e9><b>"))
    )
    assert [id for piece in ids for id in piece.tolist()] == [300, *"<\u00e9>".encode(), 301, 300, 301]


def test_other_pipelines_can_be_pickled_and_have_a_fingerprint(pipeline):
    ours, theirs = pipeline
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.encode("a<a>b quick") == theirs.encode("a<a>b quick", add_special_tokens=False).ids
    assert copy.fingerprint() == ours.fingerprint() != TreeTokenizer.byte_level().fingerprint()


def test_missing_and_broken_files_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read: No such file"):
        TreeTokenizer.from_hf(tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read: expected a regular file"):
        TreeTokenizer.from_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").symlink_to("nowhere")  # an incomplete download
    with pytest.raises(UserError, match=r"tokenizer_config\.json: cannot be read: No such file"):
        TreeTokenizer.from_hf(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json: broken JSON"):
        TreeTokenizer.from_hf(tmp_path)


def write_ranks(path: Path, tokens: list[bytes]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    return path


def test_rank_files_are_read(tmp_path):
    """Ids are worked out by hand. Control tokens follow the ranks."""
    path = write_ranks(tmp_path / "a.tiktoken", [*(bytes([b]) for b in range(256)), b"ab", b"bc", b"abc"])
    ours = TreeTokenizer.from_tiktoken(path)
    assert ours.encode("abc") == [258]
    assert ours.encode("bcab") == [257, 256]
    assert ours.encode("abb<|im_end|>") == [256, 98, 259 + 2]
    assert ours.vocab_size == 259 + 26
    mine = TreeTokenizer.from_tiktoken(path, special_tokens={"<s>": 300}, normal_form=None)
    assert (mine.encode("<s>e\u0301"), mine.vocab_size) == ([300, 101, 0xCC, 0x81], 301)
    assert ours.encode("e\u0301") == list("\u00e9".encode())  # NFC


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nYg== one\n", ":2: expected a base64 token and its rank"),
        (b"YQ== 0\n\nY 1\n", ":3: expected a base64 token"),
        (b"YQ== 0\nYg== 0\n", "expected every rank once, got a rank twice"),
        (b"YQ== 0\n", "none for byte 0"),
        (gzip.compress(b"YQ== 0\n" * 99, mtime=0)[:-9], "damaged gzip file"),
    ],
)
def test_malformed_rank_files_are_errors(content, message, tmp_path):
    (tmp_path / "a.tiktoken").write_bytes(content)
    with pytest.raises(UserError) as error:
        TreeTokenizer.from_tiktoken(tmp_path / "a.tiktoken")
    assert str(error.value).startswith(str(tmp_path))
    assert message in str(error.value)


def test_a_control_token_cannot_have_the_id_of_a_rank(tmp_path):
    path = write_ranks(tmp_path / "a.tiktoken", [bytes([b]) for b in range(256)])
    with pytest.raises(UserError, match=r"special_tokens: expected ids that no rank .* uses, got 7"):
        TreeTokenizer.from_tiktoken(path, special_tokens={"<s>": 7})


@pytest.mark.skipif(not RANKS.is_file(), reason="needs Qwen's rank file")
def test_qwen_ids_are_the_published_ones():
    """The defaults of ``from_tiktoken`` are enough."""
    qwen = TreeTokenizer.from_tiktoken(RANKS)
    assert qwen.encode("Hello world") == [9707, 1879]
    assert [qwen.encode(word) for word in ("assistant", "user", "system", "\n")] == [
        [77091],
        [872],
        [8948],
        [198],
    ]
    known = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657,
             "</tool_call>": 151658, "<tool_response>": 151665, "</tool_response>": 151666, "<think>": 151667,
             "</think>": 151668}  # fmt: skip
    assert known.items() <= qwen.special_tokens.items()
    assert qwen.encode("".join(known)) == list(known.values())
    assert (len(qwen.special_tokens), qwen.vocab_size) == (26, 151669)


def test_load_chooses_the_tokenizer_and_the_template(qwen_like, tmp_path):
    """Each kind of name is loaded with its own template and with another one."""
    ranks = write_ranks(tmp_path / "a.tiktoken", [*(bytes([b]) for b in range(256)), b"ab"])
    zipped = tmp_path / "a.tiktoken.gz"
    zipped.write_bytes(gzip.compress(ranks.read_bytes()))
    save(qwen_like, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("the folder's own")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ab"}]
    chatml, qwen3 = (TreeTokenizer.byte_level(t).render(messages) for t in ("chatml", "qwen3"))
    assert chatml != qwen3
    for name, ids, own in (
        ("byte", [97, 98], chatml),
        (ranks, [256], chatml),
        (str(zipped), [256], chatml),
        (tmp_path, qwen_like.encode("ab").ids, "the folder's own"),
    ):
        assert TreeTokenizer.load(name).encode("ab") == ids
        assert TreeTokenizer.load(name).render(messages) == own
        assert TreeTokenizer.load(name, "qwen3").render(messages) == qwen3
    assert qwen_like.encode("ab").ids not in ([97, 98], [256])
    with pytest.raises(
        UserError, match=r"nowhere: no such folder; expected a .* snapshot, a \.tiktoken file or byte$"
    ):
        TreeTokenizer.load("nowhere")
    with pytest.raises(UserError, match=r"byte, got a file; name the folder that holds it$"):
        TreeTokenizer.load(__file__)


def test_byte_level_tokens_decode_to_the_text():
    tokenizer = TreeTokenizer.byte_level()
    assert tokenizer.vocab_size == 256 + 26
    assert tokenizer.encode("é\n<|im_end|>") == [0xC3, 0xA9, 10, 258]
    assert tokenizer.encode("<|im_end|>", special=False) == list(b"<|im_end|>")
    assert tokenizer.encode("<think>", special=False) == [280]
    for text in fuzz(300):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not {256, 257, 258} & set(tokenizer.encode(text, special=False))


def test_invalid_text_and_unknown_ids_are_errors():
    tokenizer = TreeTokenizer.byte_level()
    with pytest.raises(UserError, match=r"text: expected Unicode text, got a lone surrogate in 'a.ud83d!'"):
        tokenizer.encode("a\ud83d!")
    with pytest.raises(UserError, match="expected ids of this vocabulary, got 282"):
        tokenizer.decode([65, 282])
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_a_full_cache_changes_no_id(monkeypatch):
    """The cache is cleared when it is full."""
    monkeypatch.setattr(encoders, "CACHE_CHARACTERS", 300)
    tokenizer = TreeTokenizer.byte_level()
    for text in fuzz(300) * 2:
        text = text.replace("<", "")
        assert tokenizer.encode(text, special=False) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer._encoder._cache) < 6


def test_fingerprints_tell_tokenizers_apart():
    """Every part of the tokenizer counts; the order in which a file lists tokens does not."""
    one, two = (Vocabulary({b"a": 0, b"b": 1}, {b"a": 0, b"b": 1}, (), "x+", ("NFC",)) for _ in range(2))
    two.tokens.update({b"a": two.tokens.pop(b"a")})
    chat = ChatTemplate("{{ bos_token }}", "(text)", {"bos_token": "<s>"})
    spans = ChatTemplate("{{ messages[0].content | text }}", "(text)")
    fingerprints = [
        tokenizer.fingerprint()
        for tokenizer in (
            TreeTokenizer(one, None),
            TreeTokenizer(replace(one, tokens={b"a": 0, b"b": 2}), None),
            TreeTokenizer(replace(one, ranks={b"a": 1, b"b": 0}), None),
            TreeTokenizer(replace(one, added=(VocabularyToken("<s>", 2),)), None),
            TreeTokenizer(replace(one, added=(VocabularyToken("<s>", 2, True),)), None),
            TreeTokenizer(replace(one, pattern="x*"), None),
            TreeTokenizer(replace(one, normal_forms=("NFD",)), None),
            TreeTokenizer(one, chat),
            TreeTokenizer(one, ChatTemplate(chat.source, "(text)", {"bos_token": "<S>"})),
            TreeTokenizer(one, ChatTemplate("{{  bos_token }}", "(text)", {"bos_token": "<s>"})),
            *(
                TreeTokenizer(replace(one, added=(VocabularyToken("<s>", 2, special=flag),)), spans)
                for flag in (True, False)
            ),
        )
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert fingerprints[0] == TreeTokenizer(two, None).fingerprint()
    assert fingerprints[7] == TreeTokenizer(one, ChatTemplate(chat.source, "x", chat.constants)).fingerprint()
    # The same in every process and under every version of Python.
    assert fingerprints[7] == "fc36f54cccc432b9adb56b54f00753468bfedba90fb659fde3c1cc2a7dd35c6d"


def test_a_pickled_copy_encodes_and_renders_the_same(qwen_like, tmp_path):
    """Data workers receive such a copy."""
    save(qwen_like, tmp_path)
    ours = TreeTokenizer.from_hf(tmp_path, template="qwen3")
    copy = pickle.loads(pickle.dumps(ours))
    messages = [{"role": "user", "content": "a<think>\u0338"}]
    assert copy.render(messages) == ours.render(messages)
    assert copy.encode(ours.render(messages)) == ours.encode(ours.render(messages))


def test_a_text_that_tiktoken_cannot_split_is_refused_in_one_line():
    with pytest.raises(
        UserError, match=r"^text: tiktoken cannot split ' {20}'\.\.\., 1,000,000 characters: "
    ):
        TreeTokenizer.byte_level().encode(" " * 1_000_000)

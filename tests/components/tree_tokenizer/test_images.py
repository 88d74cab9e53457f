"""Samples of conversations with images, against the processor of Qwen3-VL in transformers."""

import dataclasses
import random

import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.tokenizer_files import published_template
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.hf_files import write_byte_tokenizer
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.vocabulary import byte_vocabulary
from titan_tree.errors import UserError
from titan_tree.tree.images import Image

BYTES = TreeTokenizer.byte_level()
PAD, END = (BYTES.special_tokens[name] for name in ("<|image_pad|>", "<|im_end|>"))
ASK, SAY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
PUBLISHED = ("qwen3_vl", "qwen3_5_think", "qwen3_6", "qwen3_8")
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
SHOW = (  # a template's text of content
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<|image_pad|>' }}{% endfor %}{% endif %}"
)


def template_of(name):
    """Returns the name of a built-in template, or the file of a published one."""
    return published_template(name) if name in PUBLISHED else name


def picture(seed, rows=8, columns=8):
    return Image(np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), np.uint8))


def text(words):
    return {"type": "text", "text": words}


def shown(image):
    return {"type": "image", "image": image}


def processor_of(tokenizer, folder):
    """Returns the processor of Qwen3-VL with a tokenizer of bytes and its chat template."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class Processor(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, *arguments):
            """Accepts that there is no processor of videos."""

    write_byte_tokenizer(tokenizer, {}, folder)
    half = [0.5, 0.5, 0.5]
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    images = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size, image_mean=half, image_std=half)
    source = (folder / "chat_template.jinja").read_text()
    return Processor(images, AutoTokenizer.from_pretrained(folder), None, chat_template=source)


def as_read(processor, messages, add_generation_prompt=False):
    """Returns (ids, start of each image, rows and columns of each image) as transformers makes them."""

    def part(part):
        return part if part["type"] == "text" else {"type": "image", "image": part["image"].pixels}

    given = [
        message
        if isinstance(message["content"], str)
        else {**message, "content": list(map(part, message["content"]))}
        for message in messages
    ]
    made = processor.apply_chat_template(
        given, tokenize=True, return_dict=True, add_generation_prompt=add_generation_prompt
    )
    kinds = np.diff(np.array(made["mm_token_type_ids"][0]), prepend=0)
    grids = [(h // 2, w // 2) for _, h, w in np.array(made.get("image_grid_thw", [])).reshape(-1, 3).tolist()]
    return list(made["input_ids"][0]), np.flatnonzero(kinds == 1).tolist(), grids


def conversation(draw):
    """Returns a random conversation of users, calls and tools, with images between texts."""

    def content():
        if draw.random() < 0.2:
            return "no image"
        parts = [draw.choice([text("Öne"), text("two <b>"), shown(picture(1))]) for _ in "123"]
        return [*parts, shown(picture(draw.randrange(3), 8, draw.choice([8, 9])))]

    messages = [{"role": "system", "content": "Look."}]
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": content()})
        if draw.random() < 0.5:
            function = {"name": "click", "arguments": {"x": draw.randrange(9)}}
            calls = [{"type": "function", "function": function}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": content()})
        messages.append({"role": "assistant", "content": draw.choice(["Yes.", "No, look again."])})
    return messages


@for_each("name", ["chatml", *PUBLISHED])
def test_tokens_masks_and_images_are_those_of_transformers(name, tmp_path):
    tokenizer = TreeTokenizer.byte_level(template_of(name))
    processor = processor_of(tokenizer, tmp_path)
    num_images = 0
    for seed in range(5):
        messages = conversation(random.Random(seed))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for index, path in zip(answers, tokenizer.samples(messages), strict=True):
            ids, starts, grids = as_read(processor, messages[: index + 1])
            prompt, _, _ = as_read(processor, messages[:index], True)
            end = len(ids) - ids[::-1].index(END)
            assert path.tokens.tolist() == ids
            assert path.loss_mask.tolist() == [float(len(prompt) <= t < end) for t in range(len(ids))]
            assert [start for start, _ in path.images] == starts
            assert [(image.rows, image.columns) for _, image in path.images] == grids
            given = [part["image"] for m in messages[:index] for part in m["content"] if "image" in part]
            assert all(a is b for a, (_, b) in zip(given, path.images, strict=True))
            num_images += len(starts)
    assert num_images > 20


def test_all_kinds_of_turns_expand_placeholders():
    """Cut-off, filtered and begun answers, those of weight 0, and all turns in one sample."""
    a, b = picture(1), picture(2, 8, 9)
    looks = [{"role": "user", "content": [shown(a), text("?")]}, {"role": "user", "content": [shown(b)]}]
    answers = [
        {**SAY, "finish_reason": "length"},
        {**SAY, "finish_reason": "content_filter"},
        {**SAY, "weight": 0},
        {**SAY, "content": "AB", "prefill": "A"},
    ]
    for answer in answers:
        messages = [looks[0], answer, looks[1], SAY, ASK]
        bare = [
            {**m, "content": "".join(p.get("text", "\x07") for p in m["content"])}
            if isinstance(m["content"], list)
            else m
            for m in messages
        ]
        for turns in ("each", "last", "whole"):
            paths = BYTES.samples(messages, turns=turns)
            for path, plain in zip(paths, BYTES.samples(bare, turns=turns), strict=True):
                # The plain sample has one byte, 7, where the other one has marks around placeholders.
                at = np.flatnonzero(plain.tokens == 7)
                sizes = np.ones(len(plain), int)
                sizes[at] = [len(image) + 2 for image in (a, b)[: len(at)]]
                starts = (np.cumsum(sizes)[at] - sizes[at] + 1).tolist()
                assert path.images == tuple(zip(starts, (a, b), strict=False))
                assert path.loss_mask.tolist() == np.repeat(plain.loss_mask, sizes).tolist()
                is_image = np.repeat(plain.tokens == 7, sizes)
                assert path.tokens[~is_image].tolist() == plain.tokens[plain.tokens != 7].tolist()
                assert np.flatnonzero(path.tokens == PAD).tolist() == [
                    token for start, image in path.images for token in range(start, start + len(image))
                ]


def test_a_placeholder_in_a_text_is_text_or_an_error():
    quotes = {"role": "user", "content": [text("<|image_pad|>"), shown(picture(1)), text("a"), text("b")]}
    (path,) = BYTES.samples([quotes, SAY])
    assert len(path.images) == 1
    assert (path.tokens == PAD).sum() == 64
    assert BYTES.decode(path.tokens[: path.images[0][0]]).endswith("<|image_pad|><|vision_start|>")
    published = TreeTokenizer.byte_level(template_of("qwen3_vl"))
    with pytest.raises(UserError, match=r"messages: expected <\|image_pad\|> once for each of 1 image, got"):
        published.samples([quotes, SAY])
    with pytest.raises(UserError, match="got it 2 times"):
        published.samples([LOOK, {**SAY, "content": "<|image_pad|>"}])


def template(user="{{ show }}", tool="{{ show }}"):
    """Returns a template whose messages of users and of tools show their content in these ways."""
    bodies = {role: body.replace("{{ show }}", SHOW) for role, body in (("user", user), ("tool", tool))}
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}"
        f"{bodies['user']}{{% elif m.role == 'tool' %}}{bodies['tool']}{{% else %}}{{{{ m.content }}}}"
        "{% for c in m.tool_calls %}{{ c.function.name ~ c.function.arguments | tojson }}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    )


LOOK = {"role": "user", "content": [text("see"), shown(picture(1))]}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
SEEN = {"role": "tool", "content": [text("see"), shown(picture(1))]}
IN_SYSTEM = [{"role": "system", "content": [text("S"), shown(picture(1))]}, ASK, SAY]
ONLY_IMAGES = "{% for p in m.content if p.type == 'image' %}<|image_pad|>{% endfor %}"
ONLY_TEXT = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
LOST = {
    "of a system": ("qwen3_vl", IN_SYSTEM, r"messages\[2\]: the chat template .* shows 0 of the 1 image in"),
    "of a system, named": ("qwen3_6", IN_SYSTEM, "System message cannot contain images"),
    "all": (
        "qwen3",
        [LOOK, SAY],
        r"qwen3 does not show images \(.*startswith.*\); choose a",
    ),
    "of tools": (
        template(tool=ONLY_TEXT),
        [LOOK, CALL, SEEN, SAY],
        r"messages\[3\]: the chat template .* shows 1 of the 2 images in the prompt, so it would be trained",
    ),
    "text beside": (
        template(tool=ONLY_IMAGES),
        [LOOK, CALL, SEEN, SAY],
        r"messages\[2\] \(tool\) content: the chat template .* leaves this out of the prompt, so messages",
    ),
    "text of users": (template(user=ONLY_IMAGES), [LOOK, SAY], "does not show images"),
    "a second one": (
        template(tool=ONLY_TEXT + "{{ '<|image_pad|>' if m.content[1] }}"),
        [LOOK, CALL, {**SEEN, "content": [*SEEN["content"], shown(picture(2))]}, SAY],
        r"shows 2 of the 3 images",
    ),
    "not loaded": ("chatml", [{"role": "user", "content": [shown("a.png")]}, SAY], "Image, got 'a.png'"),
}


@for_each("template, messages, message", LOST.values())
def test_a_template_that_leaves_out_images_or_text_beside_them_is_refused(template, messages, message):
    with pytest.raises(UserError, match=message) as caught:
        TreeTokenizer.byte_level(template_of(template)).samples(messages)
    assert "\n" not in str(caught.value)


def test_text_alone_does_not_tell_that_text_beside_images_is_shown():
    shows = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{ONLY_IMAGES}{{% endif %}}"
    tokenizer = TreeTokenizer.byte_level(template(tool=shows))
    assert len(tokenizer.samples([LOOK, CALL, {**SEEN, "content": "see"}, SAY])) == 2
    with pytest.raises(UserError, match=r"messages\[2\] \(tool\) content: the chat template"):
        tokenizer.samples([LOOK, CALL, SEEN, SAY])


def test_a_template_that_shows_all_is_not_refused():
    (*_, path) = TreeTokenizer.byte_level(template()).samples([LOOK, CALL, SEEN, SAY])
    assert len(path.images) == 2


def test_a_tokenizer_without_the_token_is_refused():
    added = tuple(token for token in byte_vocabulary().added if token.content != "<|image_pad|>")
    vocabulary = dataclasses.replace(byte_vocabulary(), added=added)
    tokenizer = TreeTokenizer(vocabulary, ChatTemplate.load("chatml"))
    with pytest.raises(UserError, match=r"got it 0 times .* choose a tokenizer that has this token"):
        tokenizer.samples([LOOK, SAY])


def test_a_conversation_of_text_parts_stays_text():
    parts = {"role": "user", "content": [text("a"), text("b")]}
    assert BYTES.render([parts]) == BYTES.render([{"role": "user", "content": "a\nb"}])
    assert BYTES.render([LOOK]) == f"<|im_start|>user\nsee{VISION}<|im_end|>\n"

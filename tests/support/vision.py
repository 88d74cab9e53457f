"""Small models of transformers with vision, and paths with images. The oracle runs every path alone."""

import numpy as np
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.oracle import EXPERTS, SIZES, path_coefficients
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.pretrained import load_pretrained
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath

KINDS = ("Qwen3_5", "Qwen3_5Moe", "Qwen3VL", "Qwen3VLMoe")
IMAGE, START, END = 58, 59, 60  # ids: placeholder of an image token, begin and end of an image
PATCH = 8  # pixels per token in each direction
TOWER = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 64,
}


def vision_model(kind="Qwen3_5", tied=True, dtype=torch.float32, seed=0):
    """Returns transformers' Qwen3.5 or Qwen3-VL ("Qwen3VL"), small and random; with experts: "...Moe".

    Every parameter matters. In Qwen3.5, the second of three layers has attention, and the others have
    DeltaNet. In Qwen3-VL, two layers of the tower add to the first two layers.
    """
    text = SIZES | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "rms_norm_eps": 1e-3,  # see ``oracle.hybrid_model``
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    tower = TOWER
    if kind.startswith("Qwen3VL"):
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        text = SIZES | {"num_hidden_layers": 3, "rope_parameters": rope}
        tower = TOWER | {"deepstack_visual_indexes": [0, 1]}
    if kind.endswith("Moe"):
        text |= EXPERTS
    if kind == "Qwen3_5Moe":
        text |= {"shared_expert_intermediate_size": 20}
    ids = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=tower, tie_word_embeddings=tied, video_token_id=57, **ids
    )
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "conv1d.weight")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.uniform_(0.05, 2.0).log_()
            elif "visual" in name:
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
    return model.to(dtype).eval()


def our_model(hf, folder, vision):
    """Returns titan_tree's model of the snapshot that transformers writes of ``hf``."""
    hf.save_pretrained(folder)
    return load_pretrained(folder, next(hf.parameters()).dtype, vision=vision)


def image(rows, columns, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * PATCH, columns * PATCH, 3), dtype=np.uint8)
    return Image(pixels, PATCH)


def path_of(*parts, loss_tokens, weight=1.0):
    """Returns a path of token lists and images. The loss counts its last tokens."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, Image):
            images.append((len(tokens) + 1, part))
            tokens += [START, *[IMAGE] * len(part), END]
        else:
            tokens += part
    mask = [0.0] * (len(tokens) - loss_tokens) + [1.0] * loss_tokens
    return TokenPath(tokens, loss_mask=mask, weight=weight, images=images)


def screen_paths(seed=0):
    """Returns paths of an agent that sees screens.

    They share an image, and see one twice on a path. Two images have one size, and a path drops an image.
    The last tree shares only an image with the first one.
    """
    a, b, c, d = (image(*size, seed + i) for i, size in enumerate([(2, 3), (3, 2), (2, 2), (2, 2)]))
    random = np.random.default_rng(seed)

    def act(n):
        return random.integers(5, 50, n).tolist()

    task, first, second = [1, 2, 3, 4], act(3), act(2)
    return [
        [
            path_of(task, a, first, b, second, c, act(4), loss_tokens=4),
            path_of(task, a, first, b, second, c, act(4), loss_tokens=4, weight=0.5),
            path_of(task, a, first, b, second, d, act(3), loss_tokens=3, weight=0.7),
            path_of(task, a, first, b, second, a, act(5), loss_tokens=5, weight=2.0),
            path_of(task, [51, 52], first, b, second, c, act(3), loss_tokens=3, weight=1.5),
            path_of(task, a, first, loss_tokens=3),
        ],
        [path_of(a, act(4), loss_tokens=3), path_of(act(6), loss_tokens=5)],
    ]


def path_logprobs(hf, path):
    """Returns [T - 1] log-probabilities of one path, run alone by transformers."""
    ids = torch.as_tensor(path.tokens).long()[None]
    images = {}
    if path.images:
        process = Qwen2VLImageProcessorPil(
            do_resize=False, patch_size=PATCH // 2, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        images = dict(process([each.pixels for _, each in path.images], return_tensors="pt"))
        images["mm_token_type_ids"] = (ids == IMAGE).int()
    hf.model.rope_deltas = None
    logits = hf(input_ids=ids, use_cache=False, **images).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def per_path(hf, paths, reduction="path_mean"):
    """Returns what ``oracle.per_path`` does, for paths with images."""
    hf.zero_grad(set_to_none=True)
    logprobs, loss = [], 0.0
    for path, coefficients in zip(paths, path_coefficients(paths, reduction), strict=True):
        logprobs.append(path_logprobs(hf, path))
        path_loss = -(coefficients.to(logprobs[-1].dtype) * logprobs[-1]).sum()
        path_loss.backward()
        loss += path_loss.item()
    gradients = {
        name.removeprefix("model.").removeprefix("language_model."): p.grad
        for name, p in hf.named_parameters()
    }
    return [x.detach() for x in logprobs], loss, gradients


def run_step(model, micro_batches, partitioner=None):
    """Returns loss and gradients of a step."""
    step = TreeStep(model, TreeLoss("sft", "path_mean"), partitioner=partitioner)
    model.zero_grad(set_to_none=True)
    result = step.run(step.prepare(micro_batches))
    return result.loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

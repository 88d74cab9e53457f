"""What tests of Hugging Face snapshots share."""

import json

import torch


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def same_weights(model, hf):
    want = {name.removeprefix("model."): p for name, p in hf.named_parameters()}
    got = dict(model.named_parameters())
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)

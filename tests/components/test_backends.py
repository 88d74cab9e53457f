"""The choice among backends."""

import pytest
import torch

from titan_tree.components.backends import ATTENTION_BACKENDS, PLAIN, RECURRENCE_BACKENDS
from titan_tree.errors import UserError


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_backend_that_refuses_points_to_auto_which_works(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(1, 1, 32)
    for registry, inputs in (
        (ATTENTION_BACKENDS, (x, x, PLAIN, False)),
        (RECURRENCE_BACKENDS, (x, x, x, x[..., 0], x[..., 0])),
    ):
        monkeypatch.setattr(registry["triton"], "INTERPRET", False)
        with pytest.raises(UserError) as error:
            registry.resolve(name, x.device, *inputs)
        assert "got cpu" in str(error.value)
        assert str(error.value).endswith("; use 'auto', which chooses one that works here")
        assert registry.resolve("auto", x.device, *inputs) == "reference"

"""Models with a tower that several files share. What imports triton is imported later, as in tests/rl."""

import pytest


@pytest.fixture(scope="module")
def hf():
    from tests.support.vision import vision_model

    return vision_model()


@pytest.fixture(scope="module")
def exact(hf, tmp_path_factory):
    """Our model in float64, with the tower trained."""
    from tests.support.vision import our_model

    return our_model(hf, tmp_path_factory.mktemp("snapshot"), "train").double()

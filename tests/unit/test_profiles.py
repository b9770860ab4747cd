"""Step shapes and limits of a build."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from octavo.backends.manifest import Limits
from octavo.compiler.config import BuildConfig
from octavo.compiler.profiles import make_profiles
from octavo.graphs.errors import BuildError


def test_every_profile_stays_within_the_limits() -> None:
    limits = Limits(max_model_len=100, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
    profiles = {profile.name: profile.dims for profile in make_profiles(limits)}
    assert list(profiles) == ["decode", "prefill", "mixed", "verify"]
    for dims in profiles.values():
        for size in dims.values():
            assert size.min <= size.opt <= size.max
        assert dims["M"].max == 7  # 100 tokens take seven blocks of 16
        assert dims["B+1"].max == dims["B"].max + 1
        assert dims["L"].min == 0
    assert profiles["decode"]["T"].max == 8
    assert profiles["prefill"]["T"].max == 64
    # Eight sequences of a token and eight drafts would be 72 tokens, the step takes 64.
    assert profiles["verify"]["T"].max == profiles["verify"]["L"].max == 64


def test_the_smallest_engine_has_profiles() -> None:
    limits = Limits(max_model_len=2, max_num_seqs=4, max_num_batched_tokens=1, block_size=16)
    for profile in make_profiles(limits):
        for size in profile.dims.values():
            assert size.min <= size.opt <= size.max
        assert profile.dims["B"].max == 1


def test_the_length_defaults_to_the_models_and_never_passes_it() -> None:
    config = BuildConfig(model="m", output=Path("e"))
    assert config.limits(512).max_model_len == 512
    longer = BuildConfig(model="m", output=Path("e"), max_model_len=513)
    with pytest.raises(BuildError, match="max_model_len 513 is more than the 512 positions"):
        longer.limits(512)


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens", "block_size"])
def test_no_limit_may_be_zero(option: str) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        BuildConfig.model_validate({"model": "m", "output": "e", option: 0})

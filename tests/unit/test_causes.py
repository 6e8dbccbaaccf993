"""Which errors of workers are worth another attempt."""

from __future__ import annotations

import pytest

from ray_ckpt.elastic.causes import find_cause
from ray_ckpt.errors import (
    LeavingError,
    NonfiniteError,
    RollbackError,
    StaleGenerationError,
    StorageError,
)


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        (NonfiniteError("step 5: loss nan"), True),
        (StorageError("the disk is full"), True),
        (RollbackError("back to step 3"), False),
        (LeavingError("the attempt ends as planned"), False),
        (StaleGenerationError("attempt 4 has taken its place"), False),
        (RuntimeError("CUDA error"), False),
    ],
)
def test_a_stop_is_final_and_a_rollback_is_not(error, hopeless):
    cause = find_cause({1: error, 0: RuntimeError("Connection closed by peer")}, {})
    assert cause.hopeless == (str(error) if hopeless else "")
    assert str(error) in cause.text

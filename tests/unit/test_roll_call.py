"""The words for a wait that failed: which call, which rank, and what is no wait."""

from __future__ import annotations

import pickle

import pytest
import torch

from ray_ckpt.alike import first_difference, model_lines
from ray_ckpt.elastic.causes import find_cause, is_echo
from ray_ckpt.errors import OutOfStepError
from ray_ckpt.rollcall import explain, is_wait

LATE = RuntimeError(
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
)
GONE = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45184.")


def test_who_did_not_come_is_named_with_the_call():
    text = explain(
        0, 3, "step_end() of step 12", {0: "step_end() of step 12", 2: "close()"}, 60.0, LATE
    )
    assert (
        "step_end() of step 12: rank 0 waited 60.0 s for the others; rank 1 did not come;" in text
    )
    assert "rank 2 waits in close()" in text
    assert "errors of" not in text
    assert "an error of rank 1 further up" in text


def test_of_many_ranks_some_are_named():
    places = dict.fromkeys(range(100, 1000), "close()") | {0: "restore()", 1: "restore()"}
    text = explain(0, 1000, "restore()", places, 9.0, LATE)
    assert "ranks 2, 3, 4, 5, 6, 7, 8, 9 and 90 more did not come" in text
    assert "ranks 100, 101, 102, 103, 104, 105, 106, 107 and 892 more wait in close()" in text
    assert len(text) < 700


def test_a_process_that_is_gone_is_told_from_one_that_is_late():
    text = explain(1, 2, "backward() of step 3", {1: "backward() of step 3"}, 0.1, GONE)
    assert "rank 0 did not come, and a process is gone" in text
    assert "a process is gone" not in explain(1, 2, "x", {1: "x"}, 0.1, LATE)


def test_ranks_that_all_wait_in_one_place_accuse_nobody():
    text = explain(0, 2, "restore()", {0: "restore()", 1: "restore()"}, 9.0, LATE)
    assert "the network between them" in text
    assert "did not come" not in text


@pytest.mark.parametrize("error", [LATE, GONE, torch.distributed.DistBackendError("x")])
def test_what_torch_says_of_a_failed_wait_is_known(error):
    assert is_wait(error)


def test_a_mistake_in_a_model_is_no_wait():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_wait(caught.value)


def test_a_wait_that_failed_is_the_echo_of_another_error_and_not_the_end_of_a_run():
    echo = OutOfStepError("step_end() of step 3: rank 0 waited")
    assert is_echo(echo)
    assert isinstance(pickle.loads(pickle.dumps(echo)), OutOfStepError)
    cause = find_cause({0: echo, 1: ValueError("bad sample")}, {})
    assert (cause.text, cause.hopeless) == ("rank 1: ValueError: bad sample", "")


def test_the_first_line_that_differs_is_shown():
    assert first_difference(["a", "b"], ["a", "c"]) == "b"
    assert first_difference(["a"], ["a", "c"]) == "nothing more"
    lines = model_lines(torch.nn.BatchNorm1d(3))
    assert lines[0] == "weight: float32 [3]"
    assert lines[2] == "running_mean: float32 [3], a buffer"

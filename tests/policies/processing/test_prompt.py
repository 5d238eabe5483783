"""The prompt of a vision-language model. What is written is compared with LeRobot's in tests/parity/processing."""

import pytest
import torch

from flexor.core.errors import FlexorError
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline
from flexor.policies.processing.prompt import AddNewLine, AddNewLinePi0, StateInPrompt, StateInPromptFast

STATE = torch.tensor([[-1.0, 0.0, 0.999]])


def test_bins_go_from_0_to_255_and_outside_is_kept_at_the_ends():
    state = torch.tensor([[-9.0, -1.0, 0.0, 1.0, 9.0]])
    prompt = StateInPrompt()({"task": ["lift_it"], "observation.state": state})["task"]
    assert prompt == ["Task: lift it, State: -1 0 128 255 255;\nAction: "]


def test_the_batch_that_was_given_is_not_changed():
    original = {"task": ["a"], "observation.state": STATE}
    for step in (AddNewLine(), StateInPrompt()):
        step(original)
    assert original["task"] == ["a"]


def test_steps_are_saved_under_their_names_and_read_with_what_lerobot_saves(tmp_path):
    steps = [AddNewLine(), AddNewLinePi0(), StateInPrompt(max_state_dim=7), StateInPromptFast()]
    Pipeline(PREPROCESSOR, steps).save(tmp_path)
    again = Pipeline.load(tmp_path, PREPROCESSOR).steps
    assert [type(step) for step in again] == [type(step) for step in steps]
    assert again[2].max_state_dim == 7
    assert StateInPrompt.from_config({}).max_state_dim == 32  # LeRobot saves no settings


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"task": ["a"]}, "observation.state into its prompt, but the batch has none"),
        ({"observation.state": STATE}, "no 'task'"),
        ({"task": ["a"], "observation.state": STATE[None]}, r"shape \[1, 1, 3\]"),
    ],
)
def test_what_is_missing_is_named(batch, message):
    with pytest.raises(FlexorError, match=message):
        StateInPrompt()(batch)


def test_a_rehearsal_reads_no_values():
    batch = {"task": ["a"], "observation.state": torch.empty(1, 3, device="meta")}
    assert StateInPrompt().rehearse(batch)["task"] == ["a"]

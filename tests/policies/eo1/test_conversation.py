"""The prompt of EO-1: its tokens, its padding, and what is refused."""

import json

import pytest
import torch

from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.policies.eo1.conversation import (
    CONVERSATION,
    PROMPT,
    PROMPT_MASK,
    STATE_MASK,
    WORDS,
    ConversationTemplate,
    TokenizeConversation,
)
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline, StepContext
from parity.eo1.qwen import ROWS, VOCABULARY, make_qwen, write
from support.tokenizers import make_tokenizer

CAMERAS = {"observation.images.top": (28, 56), "observation.images.wrist": (56, 56)}  # 2 and 4 tokens
FEATURES = {name: PolicyFeature(Kind.VISUAL, (3, *size)) for name, size in CAMERAS.items()}
STATE = {"observation.state": PolicyFeature(Kind.STATE, (4,))}
CHUNK = 3
TASKS = ["open the drawer", "pick up the red cube", ""]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(make_qwen(tmp_path_factory.mktemp("qwen")))


def steps(base: str, **settings) -> Pipeline:
    template = ConversationTemplate({**STATE, **FEATURES}, CHUNK)
    tokenize = TokenizeConversation(base, image_min_pixels=784, image_max_pixels=8 * 784, **settings)
    return Pipeline(PREPROCESSOR, [template, tokenize])


def words(batch: dict) -> list[list[str]]:
    added = ["action_start", "action_pad", "action_end", "state_start", "state_pad", "state_end", "vla"]
    names = [*VOCABULARY, *(f"<|{name}|>" for name in added)]
    return [
        [names[token] for token in row[mask].tolist()] for row, mask in zip(batch[PROMPT], batch[PROMPT_MASK])
    ]


def test_the_tokens_of_a_conversation(base):
    batch = steps(base)({"task": TASKS})
    image = "<|vision_start|> {} <|vision_end|>".format
    pads = [image(" ".join(["<|image_pad|>"] * count)) for count in (2, 4)]
    system = "<|im_start|> system \n You are a helpful physical assistant . <|im_end|> \n"
    user = "<|im_start|> user \n {} <|state_start|> <|state_pad|> <|state_end|> {} <|vla|> <|im_end|> \n"
    robot = "<|im_start|> assistant \n <|action_start|> <|action_pad|> <|action_pad|> <|action_pad|>"
    for row, task in zip(words(batch), TASKS):
        expected = " ".join((system, user, robot)).format(" ".join(pads), task)
        assert " ".join(row).split(" ") == [word for word in expected.split(" ") if word]
    assert words(batch)[0][3 + 7 + 2 + 2] == "\n"


def test_padding_comes_first_and_actions_have_the_same_place(base):
    batch = steps(base)({"task": TASKS})
    tokens, mask, state = batch[PROMPT], batch[PROMPT_MASK], batch[STATE_MASK]
    assert tokens.shape == (3, 80) and WORDS + 10 + 32 + CHUNK == 70
    assert (mask.int().diff() >= 0).all() and mask[:, -1].all()
    assert (tokens[:, -CHUNK:] == tokens[0, -1]).all() and (tokens[:, -CHUNK - 1] != tokens[0, -1]).all()
    assert state.sum(1).tolist() == [1, 1, 1] and len(set(tokens[state].tolist())) == 1
    assert not (state & ~mask).any()


def test_a_plan_has_batches_of_the_same_shape(base):
    pipeline = steps(base)
    rehearsal = Pipeline(PREPROCESSOR, pipeline.steps, rehearsal=True)
    real, planned = pipeline({"task": TASKS}), rehearsal({"task": TASKS})
    assert {key: (value.shape, value.dtype) for key, value in real.items() if key != "task"} == {
        key: (value.shape, value.dtype) for key, value in planned.items() if key != "task"
    }
    assert CONVERSATION not in real and CONVERSATION not in planned


def test_a_long_task_is_not_cut_off(base):
    batch = steps(base)({"task": ["the red cube " * 20, "open"]})
    assert batch[PROMPT].shape[1] == 112 and WORDS + 10 + 64 + CHUNK == 102
    assert words(batch)[0].count("cube") == 20
    with pytest.raises(FlexorError, match=r"'the the .* has 1001 tokens, and EO-1 reads at most 1000"):
        steps(base)({"task": ["the " * 1001]})


def test_an_image_that_a_sample_lacks_is_not_in_its_prompt(base):
    masks = {"observation.images.wrist_padding_mask": torch.tensor([True, False, True])}
    hidden = words(steps(base)({"task": TASKS, **masks}))
    every = words(steps(base)({"task": TASKS}))
    assert hidden[0] == every[0] and hidden[2] == every[2]
    first = every[1].index("<|vision_end|>") + 1  # after the image of the other camera
    assert hidden[1] == every[1][:first] + every[1][first + 6 :]


def test_training_and_acting_have_the_same_prompt(base):
    acting, training = (steps(base)({"task": TASKS}, StepContext(training=which)) for which in (False, True))
    assert all(torch.equal(acting[key], training[key]) for key in (PROMPT, PROMPT_MASK, STATE_MASK))


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|state_pad|>", "<|action_pad|>"])
def test_a_task_with_placeholders_is_refused(base, token):
    with pytest.raises(FlexorError, match=r"has <\|\w+_pad\|> in it"):
        steps(base)({"task": [f"pick up {token}"]})


def test_a_missing_task_is_named(base):
    with pytest.raises(FlexorError, match="requires a task description, but the batch has no 'task'"):
        steps(base)({"observation.state": torch.zeros(1, 4)})


def test_another_tokenizer_is_refused(tmp_path):
    folder = make_tokenizer(tmp_path)
    with pytest.raises(
        ConfigError, match=r"its tokenizer has no <\|im_start\|>, <\|im_end\|>, <\|vision_start"
    ):
        steps(str(folder)).prepare()


def test_a_tokenizer_of_a_larger_model_is_refused(base):
    steps(base, vocabulary=ROWS).prepare()
    most = len(VOCABULARY) + 7
    with pytest.raises(
        ConfigError, match=f"has {most} tokens, but the model has embeddings of only {most - 1}"
    ):
        steps(base, vocabulary=most - 1).prepare()


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(
        ConfigError, match=r"Can't load a AutoTokenizer.*must hold config.json, tokenizer.json"
    ):
        steps(str(tmp_path)).prepare()


def test_steps_are_saved_as_lerobot_has_them(base, tmp_path):
    steps(base, vocabulary=ROWS).save(tmp_path)
    template, tokenize = json.loads((tmp_path / f"{PREPROCESSOR}.json").read_text())["steps"]
    assert template["registry_name"] == "eo1_conversation_template_processor"
    assert template["config"]["chunk_size"] == CHUNK
    assert template["config"]["input_features"]["observation.state"] == {"type": "STATE", "shape": [4]}
    assert tokenize["registry_name"] == "eo1_qwen_processor"
    assert tokenize["config"] == {
        "processor_name": base,
        "image_min_pixels": 784,
        "image_max_pixels": 8 * 784,
        "use_fast_processor": False,
    }
    loaded = Pipeline.load(tmp_path, PREPROCESSOR)
    assert torch.equal(loaded({"task": TASKS})[PROMPT], steps(base)({"task": TASKS})[PROMPT])


def test_steps_of_later_releases(base, tmp_path):
    steps(base).save(tmp_path)
    file = tmp_path / f"{PREPROCESSOR}.json"
    saved = json.loads(file.read_text())
    saved["steps"][1]["config"] |= {"tokenizer_max_length": 1000, "truncation": True}
    prompts = {"registry_name": "render_generation_prompt_processor", "config": {"recipe": {"messages": []}}}
    write(file, {**saved, "steps": [prompts, *saved["steps"]]})
    batch = Pipeline.load(tmp_path, PREPROCESSOR)({"task": TASKS})
    assert torch.equal(batch[PROMPT], steps(base)({"task": TASKS})[PROMPT])
    recipe = {"registry_name": "render_messages_processor", "config": {"recipe": {"messages": []}}}
    write(file, {**saved, "steps": [prompts, recipe, *saved["steps"]]})
    with pytest.raises(CheckpointError, match="trained with a language recipe"):
        Pipeline.load(tmp_path, PREPROCESSOR)

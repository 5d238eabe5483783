"""The prompt of WALL-X: its tokens, its padding, answers of actions, and what is refused."""

import pickle

import numpy as np
import pytest
import torch

from flexor.core.errors import ConfigError, FlexorError
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline
from flexor.policies.wall_x.answer import ANSWER_MASK, TokenizeAnswer
from flexor.policies.wall_x.images import grid_of
from flexor.policies.wall_x.prompt import (
    NO_TASK,
    PROMPT,
    PROMPT_MASK,
    STATE_MASK,
    TokenizePrompt,
    WallXTask,
    camera_name,
    scale_points,
)
from parity.eo1.qwen import make_tokenizer as make_words
from parity.pi0_fast.cases import make_fast
from parity.wall_x.models import ADDED, SPECIAL, VOCABULARY, WORDS, make_wall
from support.tokenizers import make_tokenizer

CAMERAS = {
    "observation.images.top": (28, 256),
    "observation.images.left_wrist_view": (28, 256),
}  # 9 tokens each
CHUNK = 3
TASKS = ["open the drawer", "pick up the red cube.", ""]
STATE = {"observation.state": torch.zeros(3, 4)}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    folder = make_wall(tmp_path_factory.mktemp("wall"))
    make_fast(folder / "fast")
    return str(folder)


def steps(base: str, **settings) -> Pipeline:
    return Pipeline(PREPROCESSOR, [WallXTask(), TokenizePrompt(base, CAMERAS, CHUNK, **settings)])


def answering(base: str, tokenizer: str = "fast") -> Pipeline:
    return Pipeline(PREPROCESSOR, [TokenizeAnswer(base, CAMERAS, 0, action_tokenizer=f"{base}/{tokenizer}")])


def words(batch: dict) -> list[list[str]]:
    return [
        [VOCABULARY[token] for token in row[mask].tolist()]
        for row, mask in zip(batch[PROMPT], batch[PROMPT_MASK])
    ]


def test_the_tokens_of_a_prompt(base):
    batch = steps(base)({"task": TASKS})
    pads = " ".join(["<|image_pad|>"] * 9)
    images = [f"{name} view: <|vision_start|> {pads} <|vision_end|>" for name in ("top", "left wrist")]
    system = "<|im_start|> system \n You are a helpful assistant . <|im_end|> \n"
    user = "<|im_start|> user \n Observation: {} \n Instruction: {} \n"
    request = "Predict the next action in robot action . \n Proprioception: <|propri|> \n <|im_end|> \n"
    robot = "<|im_start|> assistant \n <|action|> <|action|> <|action|>"
    for row, task in zip(words(batch), ("open the drawer .", "pick up the red cube .", ".")):
        expected = " ".join((system, user, request, robot)).format(" ".join(images), task)
        assert " ".join(row).split(" ") == [word for word in expected.split(" ") if word]


def test_padding_comes_first_and_actions_have_the_same_place(base):
    batch = steps(base)({"task": TASKS})
    tokens, mask, state = batch[PROMPT], batch[PROMPT_MASK], batch[STATE_MASK]
    assert tokens.shape[1] % 16 == 0 and state.shape[1] == tokens.shape[1] - CHUNK
    assert (mask.int().diff() >= 0).all() and mask[:, -1].all()
    assert (tokens[:, -CHUNK:] == VOCABULARY.index("<|action|>")).all()
    assert state.sum(1).tolist() == [1, 1, 1]
    assert (tokens[:, :-CHUNK][state] == VOCABULARY.index("<|propri|>")).all()


def test_a_plan_has_batches_of_the_same_shape(base):
    """With words of Qwen's tokenizer, which are a few more than here."""
    tokenize = TokenizePrompt(base, CAMERAS, 8)
    real, planned = tokenize({"task": TASKS}), tokenize.rehearse({"task": TASKS})
    assert {key: (value.shape, value.dtype) for key, value in real.items() if key != "task"} == {
        key: (value.shape, value.dtype) for key, value in planned.items() if key != "task"
    }
    columns = {"task": TASKS, "action": torch.zeros(3, 6, 4)}
    real, planned = answering(base)(columns), answering(base).steps[0].rehearse(columns)
    assert {key: value.dtype for key, value in real.items() if key != "task"} == {
        key: value.dtype for key, value in planned.items() if key != "task"
    }


def test_an_image_that_a_sample_lacks_is_not_in_its_prompt(base):
    masks = {"observation.images.top_padding_mask": torch.tensor([True, False, True])}
    hidden, every = words(steps(base)({"task": TASKS, **masks})), words(steps(base)({"task": TASKS}))
    assert hidden[0] == every[0] and hidden[2] == every[2]
    first = every[1].index("<|vision_start|>")
    assert hidden[1] == every[1][:first] + every[1][first + 11 :]


def test_tasks_are_sentences():
    assert WallXTask()({"task": TASKS})["task"] == ["open the drawer.", "pick up the red cube.", "."]
    assert WallXTask()(dict(STATE))["task"] == WallXTask()({**STATE, "task": None})["task"] == [NO_TASK] * 3


@pytest.mark.parametrize(
    ("camera", "name"),
    [
        ("observation.images.face_view", "front view"),
        ("observation.images.move2_view", "move view"),
        ("observation.images.left_wrist_view", "left wrist view"),
        ("observation.images.overhead_cam", "overhead_cam view"),
        ("observation.image", "observation.image view"),
    ],
)
def test_names_of_cameras(camera, name):
    assert camera_name(camera) == name


def test_points_are_those_of_the_prepared_image():
    assert grid_of(480, 640).size == (196, 252)
    scaled = scale_points("put <point>[320, 240]</point> on <point>(0,0,640,480)</point>", 480, 640)
    assert scaled == "put <point>[126, 98]</point> on <point>[0, 0, 251, 195]</point>"
    assert (
        scale_points("<point>7 8 9</point> <point>none", 480, 640) == "<point>[7, 8, 9]</point> <point>none"
    )


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|propri|>", "<|action|>"])
def test_a_task_with_placeholders_is_refused(base, token):
    with pytest.raises(FlexorError, match=r"has <\|\w+\|> in it"):
        steps(base)({"task": [f"pick up {token}"]})


def test_a_prompt_that_lerobot_would_cut_off_is_refused(base):
    with pytest.raises(FlexorError, match=r"has 8\d\d tokens, of which .* for images and 3 for actions"):
        steps(base)({"task": ["the " * 760]})


def test_other_tokenizers_are_refused(base, tmp_path):
    with pytest.raises(ConfigError, match=r"has no <\|action\|>, <\|propri\|>, <\|im_start\|>"):
        steps(str(make_tokenizer(tmp_path / "other"))).prepare()
    with pytest.raises(ConfigError, match="tokens, but the model has embeddings of only 40"):
        steps(base, vocabulary=40).prepare()
    with pytest.raises(ConfigError, match="Can't load a AutoTokenizer"):
        steps(str(tmp_path)).prepare()


def test_steps_can_be_pickled(base):
    for pipeline in (steps(base), answering(base)):
        pipeline({"task": TASKS})
        again = pickle.loads(pickle.dumps(pipeline))
        assert torch.equal(again({"task": TASKS})[PROMPT], pipeline({"task": TASKS})[PROMPT])


# Fast mode.


def test_answers_are_the_words_of_actions(base):
    """Missing values have none, and what is read back is the chunk."""
    chunks = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32).round(1)
    chunks[1, :, 2] = np.nan
    pipeline = answering(base)
    step = pipeline.steps[0]
    assert isinstance(step, TokenizeAnswer)
    batch = pipeline({"task": TASKS, "action": torch.from_numpy(chunks)})
    learned, state = batch[ANSWER_MASK], batch[STATE_MASK]
    assert state.shape[1] + learned.shape[1] == batch[PROMPT].shape[1] and learned.shape[1] % 32 == 0
    for number, values in enumerate((4, 3, 4)):
        row = batch[PROMPT][number, -learned.shape[1] :][learned[number]].tolist()
        assert [VOCABULARY[token] for token in row[-2:]] == ["<|im_end|>", "\n"]
        decoded = step.fast.decode([step.words.decode(row)], 6, values)
        real = chunks[number][:, ~np.isnan(chunks[number][0])]
        assert decoded.problems == [""] and np.abs(decoded.actions[0] - real).max() < 0.2


def test_actions_beyond_the_end_of_a_turn_are_not_read(base):
    step = answering(base).steps[0]
    assert isinstance(step, TokenizeAnswer)
    first = VOCABULARY.index("<|action_token_0|>")
    assert step.words.decode([first + 3, 5, first, VOCABULARY.index("<|im_end|>"), first + 7]) == [3, 0]


def test_tokenizers_that_do_not_go_together(base, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    make_words(plain, SPECIAL, [*WORDS, *ADDED[:2]])
    with pytest.raises(ConfigError, match=r"has no words <\|action_token_0\|>.*fast requires"):
        _ = TokenizeAnswer(str(plain), CAMERAS, 0, action_tokenizer=f"{base}/fast").words
    few = tmp_path / "few"
    few.mkdir()
    make_words(few, SPECIAL, [*WORDS, *ADDED[:12]])
    with pytest.raises(ConfigError, match="has words for only 10 of them"):
        TokenizeAnswer(str(few), CAMERAS, 0, action_tokenizer=f"{base}/fast").prepare()

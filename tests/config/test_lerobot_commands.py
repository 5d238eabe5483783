"""LeRobot's commands and settings files: taken as they are, or refused with a reason."""

import json

import pytest

from flexor.config.parse import load_config
from flexor.config.schema import pushes_policy
from flexor.core.errors import ConfigError
from flexor.core.typed import to_plain
from flexor.policies.adapters import LoraConfig

DATA = "--dataset.root=somewhere"


LEROBOT_TRAIN = [
    "--dataset.repo_id=me/data",
    "--dataset.repo_type=dataset",
    "--dataset.root=somewhere",
    "--dataset.episodes=[0, 1]",
    "--dataset.image_transforms.enable=false",
    "--dataset.image_transforms.max_num_transforms=3",
    "--dataset.revision=main",
    "--dataset.use_imagenet_stats=true",
    "--dataset.video_backend=torchcodec",
    "--dataset.return_uint8=true",
    "--dataset.depth_output_unit=mm",
    "--dataset.streaming=false",
    "--dataset.eval_split=0.1",
    "--policy.type=act",
    "--policy.device=cuda",
    "--policy.use_amp=false",
    "--policy.use_peft=false",
    "--policy.push_to_hub=false",
    "--policy.repo_id=me/policy",
    "--policy.private=true",
    "--policy.tags=[a, b]",
    "--policy.license=apache-2.0",
    "--policy.pretrained_path=null",
    "--policy.pretrained_revision=null",
    "--policy.n_obs_steps=1",
    "--policy.chunk_size=50",
    "--policy.n_action_steps=50",
    "--policy.optimizer_lr=1e-5",
    "--policy.input_features=null",
    "--policy.output_features=null",
    "--output_dir=outputs/train/act",
    "--job_name=act_test",
    "--resume=false",
    "--seed=1000",
    "--cudnn_deterministic=true",
    "--num_workers=4",
    "--batch_size=8",
    "--prefetch_factor=4",
    "--persistent_workers=true",
    "--dataloader_multiprocessing_context=spawn",
    "--steps=100000",
    "--env_eval_freq=20000",
    "--log_freq=200",
    "--eval_steps=100",
    "--max_eval_samples=64",
    "--tolerance_s=1e-4",
    "--save_checkpoint=true",
    "--save_freq=20000",
    "--use_policy_training_preset=true",
    "--optimizer.type=adamw",
    "--optimizer.lr=1e-4",
    "--optimizer.betas=[0.9, 0.999]",
    "--optimizer.eps=1e-8",
    "--optimizer.weight_decay=0.01",
    "--optimizer.grad_clip_norm=10",
    "--scheduler.type=cosine_decay_with_warmup",
    "--scheduler.num_warmup_steps=10",
    "--scheduler.num_decay_steps=100",
    "--scheduler.peak_lr=1e-4",
    "--scheduler.decay_lr=1e-6",
    "--env.type=pusht",
    "--eval.n_episodes=10",
    "--eval.batch_size=10",
    "--eval.use_async_envs=false",
    "--eval.recording=false",
    "--wandb.enable=true",
    "--wandb.disable_artifact=true",
    "--wandb.project=p",
    "--wandb.entity=e",
    "--wandb.notes=n",
    "--wandb.run_id=r",
    "--wandb.mode=offline",
    "--wandb.add_tags=false",
    "--job.target=local",
    "--save_checkpoint_to_hub=false",
    "--rename_map={}",
    "--peft=null",
    "--reward_model=null",
    "--sample_weighting=null",
]


def test_a_lerobot_command_with_everything_is_taken(log_lines):
    config = load_config(LEROBOT_TRAIN)
    assert config.optimizer.lr == 1e-4 and config.deterministic and config.dataset.episodes == [0, 1]
    message = " ".join(log_lines)
    for ignored in (
        "prefetch_factor",
        "dataset.video_backend",
        "wandb.add_tags",
        "tolerance_s",
    ):
        assert f"--{ignored} has no effect in Flexor" in message
    assert "push_to_hub" not in message and "repo_id" not in message  # it has an effect
    assert config.policy.repo_id == "me/policy" and config.policy.tags == ["a", "b"] and config.policy.private
    assert not pushes_policy(config)  # push_to_hub=false


@pytest.mark.parametrize("flag", LEROBOT_TRAIN)
def test_each_lerobot_flag_alone(flag):
    # a schedule's settings only mean something together
    together = [f for f in LEROBOT_TRAIN if f.startswith("--scheduler.") and flag.startswith("--scheduler.")]
    load_config(
        ["--dataset.root=x", "--dataset.eval_split=0.1", "--policy.n_action_steps=1", *together, flag]
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--dataset.repo_type=bucket",
        "--use_policy_training_preset=false",
        "--job.target=a100-large",
        "--peft={r: 8}",
        "--peft.method_type=MISS",
        "--peft.init_type=pissa",
        "--reward_model.type=classifier",
        "--eval.recording=true",
    ],
)
def test_what_lerobot_has_and_flexor_has_not_is_refused_with_a_reason(flag):
    with pytest.raises(ConfigError, match=r"is not supported: \w+"):
        load_config([DATA, flag])


def test_lerobots_sample_weighting():
    assert load_config([DATA]).sample_weighting.resolved_type == "uniform"
    flags = [
        "--sample_weighting.type=rabc",
        "--sample_weighting.head_mode=dense",
        "--sample_weighting.kappa=0.02",
    ]
    weighting = load_config([DATA, *flags, "--sample_weighting.epsilon=1e-5"]).sample_weighting
    assert (weighting.resolved_type, weighting.head_mode, weighting.kappa, weighting.epsilon) == (
        "rabc",
        "dense",
        0.02,
        1e-5,
    )
    assert (
        load_config([DATA, "--sample_weighting.progress_path=p.parquet"]).sample_weighting.resolved_type
        == "rabc"
    )
    before = load_config(
        [DATA, "--use_rabc=true", "--rabc_kappa=0.05", "--rabc_head_mode=dense"]
    ).sample_weighting
    assert (before.type, before.kappa, before.head_mode) == ("rabc", 0.05, "dense")
    assert (
        load_config([DATA, "--use_rabc=false", "--rabc_kappa=0.05"]).sample_weighting.resolved_type
        == "uniform"
    )
    with pytest.raises(ConfigError, match=r"sample_weighting.type='other' is not valid"):
        load_config([DATA, "--sample_weighting.type=other"])


AUGMENTED = "dataset.image_transforms"
JITTER = {"type": "ColorJitter", "weight": 2.0, "kwargs": {"hue": [-0.1, 0.1]}}


@pytest.mark.parametrize(
    "flags",
    [
        [f"--{AUGMENTED}.enable=true", f"--{AUGMENTED}.tfs={json.dumps({'one': JITTER})}"],
        [f"--{AUGMENTED}.enable=true", "--dataset.image_transforms.tfs={one: {type: ColorJitter, weight: 2,"
         " kwargs: {hue: [-0.1, 0.1]}}}"],
        [f"--{AUGMENTED}={json.dumps({'enable': True, 'tfs': {'one': JITTER}})}"],
    ],
    ids=["JSON", "YAML", "all of it"],
)  # fmt: skip
def test_lerobots_forms_of_image_transforms(flags):
    settings_read = load_config([DATA, *flags]).dataset.image_transforms
    assert settings_read.enable and settings_read.max_num_transforms == 3 and not settings_read.random_order
    assert to_plain(settings_read.tfs) == {"one": JITTER}


def test_parts_of_the_default_image_transforms_can_change():
    default = to_plain(load_config([DATA]).dataset.image_transforms)
    flags = [f"--{AUGMENTED}.tfs.hue.weight=0", f"--{AUGMENTED}.tfs.affine.kwargs={{degrees: 9}}"]
    flags += [f"--{AUGMENTED}.tfs.blur.type=GaussianBlur", f"--{AUGMENTED}.tfs.blur.kwargs.kernel_size=3"]
    settings_read = to_plain(load_config([DATA, f"--{AUGMENTED}.enable", *flags]).dataset.image_transforms)
    blur = {"weight": 1.0, "type": "GaussianBlur", "kwargs": {"kernel_size": 3}}
    assert settings_read["tfs"] == {
        **default["tfs"],
        "hue": {**default["tfs"]["hue"], "weight": 0.0},
        "affine": {**default["tfs"]["affine"], "kwargs": {"degrees": 9}},
        "blur": blur,
    }
    assert list(settings_read["tfs"]) == [*default["tfs"], "blur"]


def test_image_transforms_of_a_file_can_change(tmp_path):
    file = tmp_path / "train_config.json"
    settings = {"enable": True, "max_num_transforms": 2, "random_order": True, "tfs": {"one": JITTER}}
    file.write_text(json.dumps({"dataset": {"root": "x", "image_transforms": settings}}))
    settings_read = load_config(
        [f"--config={file}", f"--{AUGMENTED}.tfs.one.weight=3", f"--{AUGMENTED}.random_order=false"]
    )
    tfs = {"one": {**JITTER, "weight": 3.0}}
    assert to_plain(settings_read.dataset.image_transforms) == {**settings, "random_order": False, "tfs": tfs}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("max_num_transforms=0", "max_num_transforms=0 must be at least 1"),
        ("tfs.hue.type=JPEGCompression", r"tfs\.hue\.type='JPEGCompression' is not supported"),
        ("tfs.hue.kwargs.hue=2", r"tfs\.hue\.kwargs\.hue=2.* is not valid for ColorJitter"),
        ("tfs.hue.wait=2", r"Unknown setting dataset\.image_transforms\.tfs\.hue\.wait='2'.*weight"),
        ("tfs=[1]", r"tfs=.* is not valid"),
        ("tfs={hue: 3}", r"tfs\.hue: expected settings"),
    ],
)
def test_image_transforms_that_can_not_be(flag, message):
    with pytest.raises(ConfigError, match=message):
        load_config([DATA, f"--{AUGMENTED}.enable=true", f"--{AUGMENTED}.{flag}"])


def test_image_transforms_that_are_off_may_be_anything_that_lerobot_has():
    load_config([DATA, f"--{AUGMENTED}.tfs={{a: {{type: JPEGCompression, kwargs: {{quality: [1, 2]}}}}}}"])


TOP_TO_FIRST = {"observation.images.top": "observation.images.camera1"}


@pytest.mark.parametrize("text", [json.dumps(TOP_TO_FIRST), str(TOP_TO_FIRST), "null", "{}"])
def test_names_to_change_are_json_or_yaml(text, tmp_path):
    expected = TOP_TO_FIRST if "top" in text else {}
    assert load_config([DATA, f"--rename_map={text}"]).rename_map == expected
    (tmp_path / "run.yaml").write_text(f"dataset: {{root: x}}\nrename_map: {text}\n")
    assert load_config([f"--config={tmp_path / 'run.yaml'}"]).rename_map == expected


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--rename_map.observation.images.top=observation.images.a", "give all names at once"),
        ("--rename_map=top", "expected dict of text, text"),
        ("--rename_map={observation.images.top: 3}", "expected text"),
        ("--rename_map={observation.images.top: a}", "'a' is not an observation"),
        ("--rename_map={action: observation.state}", "'action' is not an observation"),
        (
            "--rename_map={observation.a: observation.c, observation.b: observation.c}",
            "observation.a and obs",
        ),
    ],
)
def test_names_that_can_not_be_changed(flag, message):
    with pytest.raises(ConfigError, match=message):
        load_config([DATA, flag])


@pytest.mark.parametrize("value", ["@x", "[a", "{", "a: b: c", "%", "2020-99-99", "&"])
def test_ignored_settings_may_hold_anything(value):
    load_config([DATA, f"--dataset.video_backend={value}", f"--wandb.add_tags={value}"])


def test_a_train_config_of_lerobot_is_a_settings_file(tmp_path):
    saved = {
        "dataset": {"repo_id": "me/data", "episodes": None, "image_transforms": {"enable": False, "tfs": {}}},
        "env": None,
        "policy": {
            "type": "act",
            "chunk_size": 20,
            "n_action_steps": 20,
            "push_to_hub": False,
            "repo_id": None,
        },
        "reward_model": None,
        "resume": False,
        "steps": 10,
        "optimizer": {"type": "adamw", "lr": 1e-5, "betas": [0.9, 0.999]},
        "scheduler": None,
        "peft": None,
        "job": {"target": None, "image": "x", "tags": []},
        "rename_map": {},
        "checkpoint_path": None,
        "cudnn_deterministic": False,
    }
    file = tmp_path / "train_config.json"
    file.write_text(json.dumps(saved))
    config = load_config([f"--config_path={file}"])
    assert config.policy.chunk_size == 20 and config.optimizer.betas == (0.9, 0.999)


LEROBOT_ADAPTERS = {
    "method_type": "LORA",
    "init_type": None,
    "r": 8,
    "lora_alpha": 4,
    "target_modules": ["linear1", "linear2"],
    "full_training_modules": ["model.action_head"],
}


def test_adapters_of_lerobot(tmp_path):
    expected = LoraConfig(8, 4, 0.0, ["linear1", "linear2"], ["model.action_head"])
    flags = [f"--peft.{key}={json.dumps(value)}" for key, value in LEROBOT_ADAPTERS.items()]
    assert load_config([DATA, *flags]).lora == expected
    file = tmp_path / "train_config.json"
    file.write_text(json.dumps({"dataset": {"root": "x"}, "peft": LEROBOT_ADAPTERS}))
    assert load_config([f"--config={file}"]).lora == expected
    assert load_config([DATA, "--peft.method_type=LORA"]).lora == LoraConfig(r=16)
    defaults = {"method_type": "LORA", "target_modules": None, "lora_alpha": None, "r": 16}
    file.write_text(json.dumps({"dataset": {"root": "x"}, "peft": defaults}))
    assert load_config([f"--config={file}"]).lora == LoraConfig(r=16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora.alpha=16"], "no effect without a rank"),
        (["--lora.r=-1"], "at least 0"),
        (["--lora.r=4", "--lora.dropout=1"], "less than 1"),
        (["--lora.r=4", "--lora.target_modules=*.mlp"], "not a regular expression"),
        (["--lora.r=4", "--policy.type=tdmpc"], "updates some of its weights itself"),
    ],
)
def test_adapters_that_can_not_be(flags, message):
    with pytest.raises(ConfigError, match=message):
        load_config([DATA, *flags])


def test_amp_means_bf16_unless_the_precision_is_given():
    assert load_config([DATA, "--policy.use_amp=true"]).precision == "bf16"
    assert load_config([DATA, "--policy.use_amp=true", "--precision=fp16"]).precision == "fp16"

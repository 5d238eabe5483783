"""Policies small enough for seconds: their settings, and the pretrained models that some start from."""

from pathlib import Path

from parity.eo1.qwen import make_qwen
from parity.groot.files import BACKBONE
from parity.groot.files import make_files as make_bases
from parity.multi_task_dit.clips import make_clips
from parity.pi0_fast.cases import make_files
from parity.smolvla.vlms import make_vlms
from parity.wall_x.models import make_wall
from support import small_pi, small_resnet, small_xvla
from support.tokenizers import make_tokenizer

WITH_CAMERAS = (  # do not work without
    "vqbet",
    "pi0",
    "pi05",
    "pi0_fast",
    "smolvla",
    "eo1",
    "xvla",
    "groot",
    "wall_x",
)

TINY_ACT = [
    small_resnet.FLAG,
    "--policy.type=act",
    "--policy.device=cpu",
    "--policy.pretrained_backbone_weights=null",
    "--policy.chunk_size=4",
    "--policy.n_action_steps=4",
    "--policy.dim_model=16",
    "--policy.n_heads=2",
    "--policy.dim_feedforward=32",
    "--policy.n_encoder_layers=1",
    "--policy.n_vae_encoder_layers=1",
    "--policy.latent_dim=4",
]

SMALL = {
    "diffusion": [
        "horizon=8",
        "n_action_steps=4",
        "down_dims=[16,32]",
        "diffusion_step_embed_dim=8",
        "spatial_softmax_num_keypoints=4",
        "pretrained_backbone_weights=null",
    ],
    "vqbet": [
        "n_obs_steps=2",
        "action_chunk_size=2",
        "crop_shape=null",
        "use_group_norm=true",
        f"vision_backbone={small_resnet.NAME}",
        "pretrained_backbone_weights=null",
        "spatial_softmax_num_keypoints=4",
        "n_vqvae_training_steps=3",  # both phases, also after a resume
        "vqvae_n_embed=6",
        "vqvae_embedding_dim=8",
        "gpt_block_size=8",
        *(f"gpt_{size}_dim=16" for size in ("input", "output", "hidden")),
        "gpt_n_layer=2",
        "gpt_n_head=2",
        "dropout=0",
    ],
    "tdmpc": ["horizon=3", "latent_dim=8", "mlp_dim=16", "state_encoder_hidden_dim=8"],
    "multi_task_dit": [
        "horizon=8",
        "n_action_steps=4",
        "hidden_dim=16",
        "num_layers=2",
        "num_heads=2",
        "timestep_embed_dim=8",
        "tokenizer_max_length=20",
        "dropout=0",
    ],
    "pi0": small_pi.SETTINGS,
    "pi05": small_pi.SETTINGS,
    "smolvla": [
        "chunk_size=8",
        "n_action_steps=4",
        "num_vlm_layers=2",
        "resize_imgs_with_padding=[32,32]",
        "tokenizer_max_length=12",
        "expert_width_multiplier=0.5",
    ],
    "pi0_fast": small_pi.FAST_SETTINGS,
    "eo1": [
        "dtype=float32",
        "chunk_size=8",
        "n_action_steps=4",
        "num_denoise_steps=4",
        "image_min_pixels=784",
        "image_max_pixels=3136",
    ],
    "xvla": small_xvla.SETTINGS,
    "groot": [
        "chunk_size=8",
        "n_action_steps=4",
        "max_state_dim=8",
        "max_action_dim=7",
        "image_target_size=[64,64]",
        "image_crop_size=[60,60]",
        "image_min_pixels=4096",
    ],
    "wall_x": ["dtype=float32", "chunk_size=8", "n_action_steps=4", "max_state_dim=6", "max_action_dim=5"],
}


def small_flags(name: str, folder: Path) -> list[str]:
    """The flags of a small policy; the models that it starts from are made in a new folder."""
    flags = [f"--policy.type={name}", *(f"--policy.{each}" for each in SMALL[name])]
    if name == "multi_task_dit":
        make_clips(folder)
        flags += [f"--policy.{kind}_encoder_name={folder / 'tiny-clip'}" for kind in ("vision", "text")]
    if name in ("pi0", "pi05", "xvla"):
        flags += [f"--policy.tokenizer_name={make_tokenizer(folder)}"]
    if name == "pi0_fast":
        make_files(files := folder / "files")
        flags += [f"--policy.text_tokenizer_name={files}", f"--policy.action_tokenizer_name={files / 'fast'}"]
    if name == "smolvla":
        make_vlms(folder)
        flags += [f"--policy.vlm_model_name={folder / 'tiny-vlm'}"]
    if name == "wall_x":
        flags += [f"--policy.pretrained_name_or_path={make_wall(folder / 'tiny-wall')}"]
    if name == "eo1":
        flags += [f"--policy.vlm_base={make_qwen(folder / 'tiny-qwen')}"]
    if name == "groot":
        make_bases(folder)
        flags += [
            f"--policy.base_model_path={folder / 'tiny-groot'}",
            f"--policy.processor_name={folder / BACKBONE}",
        ]
    return flags

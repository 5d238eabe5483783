"""SAC on gym_hil's PickCube from state, with scripted help: success over environment steps.

    python benchmarks/hil_pick_cube.py [--steps=30000] [--seeds=0,1,2] [--intervener=scripted|none] [--output=FOLDER]

Needs `pip install "flexor[hil]"`. The cube lies at a random place. Every 2,500 steps, 50 episodes that were not trained
on are played without noise and without help (--every=0: at the end only). Each run prints a line per evaluation, and
one of CPU time at its end.
"""

import argparse
import json
import resource
from pathlib import Path

from flexor.config.parse import config_from_flags, parse_flags
from flexor.rl.run import train_online

SETTINGS = [
    "--policy.type=sac",
    "--policy.device=cpu",
    "--policy.num_discrete_actions=3",
    "--policy.latent_dim=64",
    "--policy.actor_network_kwargs={hidden_dims: [128, 128]}",
    "--policy.discrete_critic_network_kwargs={hidden_dims: [128, 128]}",
    "--rl.critic_network_kwargs={hidden_dims: [128, 128]}",
    "--rl.actor_lr=1e-3",
    "--rl.critic_lr=1e-3",
    "--rl.critic_target_update_weight=0.01",
    "--rl.batch_size=128",
    "--rl.capacity=50000",
    "--env.type=gym_hil",
    "--env.task=PandaPickCube-v0",
    "--env.kwargs={image_obs: false, random_block_position: true}",
    "--eval.n_episodes=50",
    "--eval.batch_size=1",
    "--log_freq=100",
    "--save_freq=500",
]


def run(seed: int, steps: int, intervener: str, every: int, folder: Path) -> None:
    flags = [
        *SETTINGS,
        f"--seed={seed}",
        f"--steps={steps}",
        f"--rl.intervener={intervener}",
        f"--env_eval_freq={every or steps}",
        f"--output_dir={folder}",
    ]
    train_online(config_from_flags(parse_flags(flags)), resume="auto")
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "eval_success_rate" in values:
            shown = {
                "step": values["step"],
                "success": values["eval_success_rate"],
                "steps": values["eval_mean_steps"],
            }
            print(f"seed {seed} help {intervener} {json.dumps(shown)}", flush=True)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(f"seed {seed} help {intervener}: {usage.ru_utime + usage.ru_stime:.0f} s of CPU time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--intervener", default="scripted")
    parser.add_argument("--every", type=int, default=2_500)
    parser.add_argument("--output", type=Path, default=Path("runs/hil"))
    parsed = parser.parse_args()
    for seed in map(int, parsed.seeds.split(",")):
        folder = parsed.output / f"{parsed.intervener}_{seed}"
        run(seed, parsed.steps, parsed.intervener, parsed.every, folder)


if __name__ == "__main__":
    main()

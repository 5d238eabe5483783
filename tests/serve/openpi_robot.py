"""Run in the environment of openpi-client: observations from standard input, actions to standard output.

Every message is a length of four bytes and NumPy's own format. `HOST PORT HORIZON` are the arguments; without a horizon
there is no broker.
"""

import io
import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def main(host, port, horizon=None):
    policy = WebsocketClientPolicy(host=host, port=int(port))
    source = policy if horizon is None else ActionChunkBroker(policy, action_horizon=int(horizon))
    print(sorted(policy.get_server_metadata()), file=sys.stderr)
    while True:
        length = sys.stdin.buffer.read(4)
        if not length:
            return
        with np.load(io.BytesIO(sys.stdin.buffer.read(int.from_bytes(length, "big")))) as file:
            observation = {name: file[name] for name in file.files}
        observation["prompt"] = str(observation["prompt"])
        if observation.pop("reset"):
            source.reset()
            observation["flexor"] = {"episode": int(observation.pop("episode"))}
        else:
            observation.pop("episode")
        result = source.infer(observation)
        assert set(result) >= {"actions", "server_timing", "policy_timing"}, result.keys()
        out = io.BytesIO()
        np.save(out, result["actions"])
        sys.stdout.buffer.write(len(out.getvalue()).to_bytes(4, "big") + out.getvalue())
        sys.stdout.buffer.flush()


main(*sys.argv[1:])

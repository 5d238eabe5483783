"""Handles hostile requests as a server does, and prints what came of them and how much memory that took at its peak.

python -m support.handle_requests
"""

from __future__ import annotations

import json
import resource

import numpy as np

from flexor.serve.form import Input, ObservationForm
from flexor.serve.limits import BadRequest, RequestLimits
from flexor.serve.request import ObservationReader
from flexor_client.errors import WireError
from flexor_client.jpeg import encode_jpeg
from flexor_client.wire import pack, unpack
from support.hostile_requests import hostile_requests

CAMERA, STATE, HEIGHT, WIDTH, PARTS = "observation.images.top", "observation.state", 480, 640, 7


def reader_for(height: int, width: int, steps: list[int] | None = None) -> ObservationReader:
    """For a policy with a camera and a state."""
    eye, joints = Input((3, height, width), True, CAMERA, True), Input((PARTS,), False, STATE, True)
    form = ObservationForm({CAMERA: eye, STATE: joints}, steps, action_size=2, horizon=16)
    return ObservationReader(form, RequestLimits.of(form))


def handle(reader: ObservationReader, frame: bytes) -> str:
    """What a client gets: "read" if it can be answered, else an error."""
    try:
        checked = reader.check(unpack(frame, reader.limits.frame))
        checked.request({file: file.decode() for file in checked.files()})
    except (WireError, BadRequest) as error:
        return str(error)
    return "read"


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    image, state = np.zeros((HEIGHT, WIDTH, 3), np.uint8), np.zeros(PARTS, np.float32)
    usual = {
        "raw": pack({CAMERA: image, STATE: state}),
        "jpeg": pack({CAMERA: encode_jpeg(image), STATE: state}),
    }
    reader = reader_for(HEIGHT, WIDTH)
    answers = {name: handle(reader, frame) for name, frame in usual.items()}
    frames = hostile_requests(CAMERA, STATE, HEIGHT, WIDTH, PARTS)
    before = peak_mb()
    answers |= {name: handle(reader, frame) for name, frame in frames.items()}
    print(json.dumps({"answers": answers, "peak_mb": peak_mb() - before}))


if __name__ == "__main__":
    main()

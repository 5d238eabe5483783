"""The robot's side of a policy that Flexor serves. Nothing here needs torch."""

from flexor_client.collector import Collector
from flexor_client.errors import ClientError, ExpiredError, LimitError, RefusedError, ServerLostError
from flexor_client.limits import ActionLimits
from flexor_client.players import ChunkPlayer, RealTimePlayer
from flexor_client.remote import RemotePolicy
from flexor_client.robot import DriveReport, RobotNames, drive

__version__ = "0.1.0"
__all__ = [
    "ActionLimits",
    "ChunkPlayer",
    "ClientError",
    "Collector",
    "DriveReport",
    "ExpiredError",
    "LimitError",
    "RealTimePlayer",
    "RefusedError",
    "RemotePolicy",
    "RobotNames",
    "ServerLostError",
    "drive",
]

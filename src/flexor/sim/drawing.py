"""Images of the built-in task, drawn with signed distances in numpy.

Every shape is a box with rounded corners (a disc has only corners), and a pixel's coverage is its
distance inside the shape. So edges are smooth, a policy can see a shift of a tenth of a pixel, and an
image for a video is the same scene with more pixels. Shapes that belong together are drawn at once, on
the few pixels around them, so a 64x64 image takes a fraction of a millisecond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# The image shows a little more than the table, so that a gripper at the edge stays in view.
VIEW = 1.12

Colour = tuple[int, int, int]

FLOOR: Colour = (44, 50, 64)
TABLE: Colour = (240, 235, 224)
TABLE_MARK: Colour = (226, 219, 205)
DISCS: tuple[Colour, ...] = ((72, 190, 132), (92, 150, 240))  # green, blue
DISC_RIMS: tuple[Colour, ...] = ((22, 128, 84), (28, 76, 168))
GOAL_DONE: Colour = (255, 206, 84)
BLOCK: Colour = (232, 72, 60)
BLOCK_TOP: Colour = (246, 116, 98)
BLOCK_RIM: Colour = (160, 34, 32)
GRIPPER: Colour = (38, 52, 92)
FINGER: Colour = (62, 96, 190)
LIGHT_FREE: Colour = (250, 250, 250)
LIGHT_GRASPED: Colour = (255, 190, 40)
SHADOW: Colour = (30, 26, 40)

FINGER_HALF = 0.045


@dataclass(frozen=True)
class Shape:
    """A box with rounded corners in table coordinates."""

    x: float
    y: float
    half_width: float
    half_height: float
    corner: float
    colour: Colour
    alpha: float = 1.0
    soft: float = 0.0  # width of the edge; 0 is one pixel


def disc(x: float, y: float, radius: float, colour: Colour, alpha: float = 1.0, soft: float = 0.0) -> Shape:
    return Shape(x, y, radius, radius, radius, colour, alpha, soft)


class Canvas:
    """A square image of the table, onto which shapes are blended."""

    def __init__(self, size: int):
        self.size = size
        self.pixel = 2 * VIEW / size
        axis = ((np.arange(size) + 0.5) * self.pixel - VIEW).astype(np.float32)
        self._x = axis[None, None, :]
        self._y = -axis[None, :, None]  # rows go down, the table's y goes up
        self.rgb = np.empty((size, size, 3), np.float32)

    def _span(self, low: float, high: float) -> slice:
        """The pixels from one coordinate to another, plus one on either side."""
        first = math.floor((low + VIEW) / self.pixel) - 1
        last = math.ceil((high + VIEW) / self.pixel) + 1
        return slice(min(max(first, 0), self.size), min(max(last, 0), self.size))

    def paint(self, shapes: list[Shape]) -> None:
        """Blend shapes, the first at the bottom, onto the window of pixels around all of them."""
        columns = self._span(
            min(s.x - s.half_width - s.soft for s in shapes), max(s.x + s.half_width + s.soft for s in shapes)
        )
        rows = self._span(
            min(-s.y - s.half_height - s.soft for s in shapes),
            max(-s.y + s.half_height + s.soft for s in shapes),
        )
        coverage = self._coverage(shapes, rows, columns)  # [shapes, rows, columns]
        target = self.rgb[rows, columns]
        for shape, share in zip(shapes, coverage):
            target += share[..., None] * (np.array(shape.colour, np.float32) - target)

    def _coverage(self, shapes: list[Shape], rows: slice, columns: slice) -> np.ndarray:
        """How much of each pixel each shape covers, times the shape's alpha."""
        numbers = [
            (s.x, s.y, s.half_width - s.corner, s.half_height - s.corner, s.corner, s.alpha, s.soft)
            for s in shapes
        ]
        x, y, half_x, half_y, corner, alpha, soft = np.array(numbers, np.float32).T[:, :, None, None]
        dx = np.abs(self._x[:, :, columns] - x) - half_x
        dy = np.abs(self._y[:, rows] - y) - half_y
        inside = np.minimum(np.maximum(dx, dy), 0)
        distance = np.sqrt(np.maximum(dx, 0) ** 2 + np.maximum(dy, 0) ** 2) + inside - corner
        edge = np.maximum(np.float32(self.pixel), soft)
        return np.minimum(np.maximum(np.float32(0.5) - distance / edge, 0), 1) * alpha

    def pixels(self) -> np.ndarray:
        """The image as uint8 [height, width, 3]."""
        return (self.rgb + np.float32(0.5)).astype(np.uint8)


class Painter:
    """Draws the scene. The table and the discs do not move during an episode, so they are drawn once."""

    def __init__(self, size: int, block_half: float, goal_radius: float):
        self._canvas = Canvas(size)
        self._block_half = block_half
        self._goal_radius = goal_radius
        self._table = self._draw_table()
        self._still = self._table
        self._still_key: object = None

    def draw(
        self,
        gripper: tuple[float, float],
        opening: float,
        block: tuple[float, float],
        discs: list[tuple[tuple[float, float], int]],
        grasped: bool,
        done: tuple[float, float] | None,
    ) -> np.ndarray:
        """The scene as uint8 [height, width, 3]. `discs` have a position and a colour; `done` is the one that glows."""
        self._draw_still(discs, done)
        self._canvas.paint(self._block(*block, grasped))
        self._canvas.paint(self._gripper(*gripper, opening, grasped))
        return self._canvas.pixels()

    def _draw_table(self) -> np.ndarray:
        canvas = self._canvas
        canvas.rgb[:] = FLOOR
        canvas.paint([Shape(0, 0, 1.06, 1.06, 0.08, TABLE)])
        for x in np.linspace(-0.75, 0.75, 7):
            for y in np.linspace(-0.75, 0.75, 7):
                canvas.paint([disc(float(x), float(y), 0.014, TABLE_MARK)])
        return canvas.rgb.copy()

    def _draw_still(
        self, discs: list[tuple[tuple[float, float], int]], done: tuple[float, float] | None
    ) -> None:
        """Restore the table with the discs on it."""
        if (discs, done) != self._still_key:
            self._canvas.rgb[:] = self._table
            for place, colour in discs:
                self._canvas.paint(self._disc(*place, colour, place == done))
            self._still, self._still_key = self._canvas.rgb.copy(), (discs, done)
        self._canvas.rgb[:] = self._still

    def _disc(self, x: float, y: float, colour: int, done: bool) -> list[Shape]:
        radius = self._goal_radius
        inner = disc(x, y, radius - 0.035, GOAL_DONE if done else DISCS[colour])
        glow = [disc(x, y, radius + 0.10, GOAL_DONE, alpha=0.55, soft=0.12)] if done else []
        return [*glow, disc(x, y, radius, DISC_RIMS[colour]), inner]

    def _block(self, x: float, y: float, grasped: bool) -> list[Shape]:
        half = self._block_half
        lift = 0.05 if grasped else 0.02  # a grasped block hangs higher, so its shadow falls further away
        return [
            Shape(x + lift, y - lift, half, half, 0.04, SHADOW, alpha=0.30, soft=0.05),
            Shape(x, y, half, half, 0.04, BLOCK_RIM),
            Shape(x, y, half - 0.022, half - 0.022, 0.03, BLOCK),
            Shape(x, y, half - 0.075, half - 0.075, 0.02, BLOCK_TOP),
        ]

    def _gripper(self, x: float, y: float, opening: float, grasped: bool) -> list[Shape]:
        """Two fingers on a palm: they touch when closed and stop at the block's sides when holding it."""
        spread = FINGER_HALF + self._block_half * (opening + 1)  # opening 0 is the width of the block
        palm = y + 0.19
        parts = [
            Shape(x - spread, y, FINGER_HALF, 0.15, 0.025, FINGER),
            Shape(x + spread, y, FINGER_HALF, 0.15, 0.025, FINGER),
            Shape(x, palm, 0.33, 0.055, 0.05, GRIPPER),
        ]
        shadows = [
            Shape(p.x + 0.06, p.y - 0.06, p.half_width, p.half_height, 0.03, SHADOW, alpha=0.22, soft=0.06)
            for p in parts
        ]
        light = LIGHT_GRASPED if grasped else LIGHT_FREE
        return [*shadows, *parts, disc(x, palm, 0.095, GRIPPER), disc(x, palm, 0.055, light)]

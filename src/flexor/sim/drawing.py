"""Pictures of the built-in task, drawn with signed distances in numpy.

Every shape is a distance field evaluated on the few pixels around it, and a pixel's coverage is how
far inside the shape it lies. So edges are smooth, a shift of a tenth of a pixel is visible to a
policy, a 64x64 picture takes a fraction of a millisecond, and the picture for a video is the same
scene with more pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# The picture shows a little more than the table, so that a gripper at the edge stays in view.
VIEW = 1.12

Colour = tuple[int, int, int]
Field = Callable[[np.ndarray, np.ndarray], np.ndarray]

FLOOR: Colour = (44, 50, 64)
TABLE: Colour = (240, 235, 224)
TABLE_MARK: Colour = (226, 219, 205)
GOAL: Colour = (72, 190, 132)
GOAL_RIM: Colour = (22, 128, 84)
GOAL_DONE: Colour = (255, 206, 84)
BLOCK: Colour = (232, 72, 60)
BLOCK_TOP: Colour = (246, 116, 98)
BLOCK_RIM: Colour = (160, 34, 32)
GRIPPER: Colour = (38, 52, 92)
FINGER: Colour = (62, 96, 190)
LIGHT_OPEN: Colour = (250, 250, 250)
LIGHT_HELD: Colour = (255, 190, 40)
SHADOW: Colour = (30, 26, 40)


def disc(x: float, y: float, radius: float) -> Field:
    """The signed distance to a disc: negative inside."""
    return lambda px, py: np.sqrt((px - x) ** 2 + (py - y) ** 2) - radius


def box(x: float, y: float, half_width: float, half_height: float, corner: float) -> Field:
    """The signed distance to a box with rounded corners."""

    def field(px: np.ndarray, py: np.ndarray) -> np.ndarray:
        dx = np.abs(px - x) - (half_width - corner)
        dy = np.abs(py - y) - (half_height - corner)
        outside = np.sqrt(np.maximum(dx, 0) ** 2 + np.maximum(dy, 0) ** 2)
        return outside + np.minimum(np.maximum(dx, dy), 0) - corner

    return field


class Canvas:
    """A square picture of the table, onto which shapes given in table coordinates are blended."""

    def __init__(self, size: int):
        self.size = size
        self.pixel = 2 * VIEW / size
        axis = ((np.arange(size, dtype=np.float32) + 0.5) * self.pixel - VIEW).astype(np.float32)
        self._x = axis[None, :]
        self._y = -axis[:, None]  # rows go down, the table's y goes up
        self.rgb = np.empty((size, size, 3), np.float32)

    def _window(self, x: float, y: float, reach_x: float, reach_y: float) -> tuple[slice, slice]:
        """The rows and columns of the pixels within reach of a point."""

        def span(centre: float, reach: float) -> slice:
            first = math.floor((centre - reach + VIEW) / self.pixel) - 1
            last = math.ceil((centre + reach + VIEW) / self.pixel) + 1
            return slice(min(max(first, 0), self.size), min(max(last, 0), self.size))

        return span(-y, reach_y), span(x, reach_x)

    def _blend(
        self, field: Field, window: tuple[slice, slice], colour: Colour, alpha: float, soft: float
    ) -> None:
        """Lay a colour over the pixels in proportion to how much of each the shape covers."""
        rows, columns = window
        distance = field(self._x[:, columns], self._y[rows, :])
        coverage = np.clip(0.5 - distance / max(self.pixel, soft), 0, 1)[..., None] * np.float32(alpha)
        target = self.rgb[rows, columns]
        target += coverage * (np.asarray(colour, np.float32) - target)

    def disc(
        self, x: float, y: float, radius: float, colour: Colour, alpha: float = 1.0, soft: float = 0.0
    ) -> None:
        reach = radius + soft
        self._blend(disc(x, y, radius), self._window(x, y, reach, reach), colour, alpha, soft)

    def box(
        self,
        x: float,
        y: float,
        half_width: float,
        half_height: float,
        colour: Colour,
        *,
        corner: float = 0.02,
        alpha: float = 1.0,
        soft: float = 0.0,
    ) -> None:
        window = self._window(x, y, half_width + soft, half_height + soft)
        self._blend(box(x, y, half_width, half_height, corner), window, colour, alpha, soft)

    def pixels(self) -> np.ndarray:
        """The picture as uint8 [height, width, 3]."""
        return (self.rgb + np.float32(0.5)).astype(np.uint8)


class Painter:
    """Draws the scene; the table and the goal, which rest during an episode, are drawn once."""

    def __init__(self, size: int, block_half: float, goal_radius: float):
        self._canvas = Canvas(size)
        self._block_half = block_half
        self._goal_radius = goal_radius
        self._table = self._draw_table()
        self._still_key: tuple[float, float, bool] | None = None
        self._still = self._table

    def _draw_table(self) -> np.ndarray:
        canvas = self._canvas
        canvas.rgb[:] = FLOOR
        canvas.box(0, 0, 1.06, 1.06, TABLE, corner=0.08)
        for x in np.linspace(-0.75, 0.75, 7):
            for y in np.linspace(-0.75, 0.75, 7):
                canvas.disc(float(x), float(y), 0.014, TABLE_MARK)
        return canvas.rgb.copy()

    def _draw_still(self, x: float, y: float, done: bool) -> None:
        """Bring back the table with the goal on it."""
        key = (x, y, done)
        canvas = self._canvas
        if key == self._still_key:
            canvas.rgb[:] = self._still
            return
        canvas.rgb[:] = self._table
        radius = self._goal_radius
        if done:
            canvas.disc(x, y, radius + 0.10, GOAL_DONE, alpha=0.55, soft=0.12)
        canvas.disc(x, y, radius, GOAL_RIM)
        canvas.disc(x, y, radius - 0.035, GOAL_DONE if done else GOAL)
        self._still, self._still_key = canvas.rgb.copy(), key

    def _draw_block(self, x: float, y: float, held: bool) -> None:
        canvas, half = self._canvas, self._block_half
        lift = 0.05 if held else 0.02  # a held block hangs higher, so its shadow falls further away
        canvas.box(x + lift, y - lift, half, half, SHADOW, corner=0.04, alpha=0.30, soft=0.05)
        canvas.box(x, y, half, half, BLOCK_RIM, corner=0.04)
        canvas.box(x, y, half - 0.022, half - 0.022, BLOCK, corner=0.03)
        canvas.box(x, y, half - 0.075, half - 0.075, BLOCK_TOP, corner=0.02)

    def _draw_gripper(self, x: float, y: float, opening: float, held: bool) -> None:
        """Two fingers under a palm: they touch when closed and stop at the block's sides when holding."""
        canvas, half = self._canvas, self._block_half
        finger = 0.045
        spread = finger + half * (opening + 1)  # opening 0 is the width of the block
        parts = [(x - spread, y, finger, 0.15), (x + spread, y, finger, 0.15), (x, y + 0.19, 0.33, 0.055)]
        for part_x, part_y, width, height in parts:
            canvas.box(
                part_x + 0.06, part_y - 0.06, width, height, SHADOW, corner=0.03, alpha=0.22, soft=0.06
            )
        for part_x, part_y, width, height in parts[:2]:
            canvas.box(part_x, part_y, width, height, FINGER, corner=0.025)
        part_x, part_y, width, height = parts[2]
        canvas.box(part_x, part_y, width, height, GRIPPER, corner=0.05)
        canvas.disc(x, y + 0.19, 0.095, GRIPPER)
        canvas.disc(x, y + 0.19, 0.055, LIGHT_HELD if held else LIGHT_OPEN)

    def draw(
        self,
        gripper: tuple[float, float],
        opening: float,
        block: tuple[float, float],
        goal: tuple[float, float],
        held: bool,
        done: bool,
    ) -> np.ndarray:
        """The scene as uint8 [height, width, 3]."""
        self._draw_still(*goal, done)
        self._draw_block(*block, held)
        self._draw_gripper(*gripper, opening, held)
        return self._canvas.pixels()

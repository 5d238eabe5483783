"""A model of torch's caching allocator, which turns a list of allocations and releases into peak memory.

A process reserves more memory than the sum of its tensors: torch's caching allocator rounds requests, reserves
memory in segments, splits and merges blocks, and returns nothing to the driver. Its rules are few and deterministic,
so they are simulated here instead of being approximated by a factor. Not modelled: blocks that another stream still
uses when they are freed (torch waits for that stream).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from flexor.plan.trace.events import Event, StepEvents, Trace, unfreed

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

ROUND = 512  # every request is a multiple of this
SMALL = MIB  # requests up to here are served from small segments
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE = 10 * MIB  # requests of at least this size get their own segment
ROUND_SEGMENT = 2 * MIB


class OutOfMemory(Exception):
    """The request does not fit, even after all cached memory is returned to the driver."""


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A range of addresses in a segment, linked to its neighbours."""

    address: int
    size: int
    pool: tuple[int, bool]  # stream, small
    free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None

    @property
    def entry(self) -> Entry:
        return self.size, self.address, self


Entry = tuple[int, int, MemoryBlock]  # size, and among equals the lowest address


@dataclass
class CachingAllocator:
    """The rules of `c10::cuda::CUDACachingAllocator` as in torch, with `malloc` and `free`."""

    capacity: int | None = None
    """Bytes that the driver has; None for no limit."""
    expandable: bool = False
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: one segment per pool, which grows at its end."""

    private: set[int] = field(default_factory=set)
    """Streams whose memory belongs to CUDA graphs: it is never returned to the driver."""

    allocated: int = 0
    reserved: int = 0
    peak_reserved: int = 0
    retries: int = 0  # how often cached memory had to be returned to the driver

    _free: dict[tuple[int, bool], list[Entry]] = field(default_factory=lambda: defaultdict(list))
    _ends: dict[tuple[int, bool], MemoryBlock] = field(default_factory=dict)  # of expandable segments
    _starts: dict[tuple[int, bool], int] = field(default_factory=dict)
    _next_address: int = 1 << 40

    def malloc(self, nbytes: int, stream: int = 0) -> MemoryBlock | None:
        """A block of at least this many bytes; None for an empty tensor."""
        if nbytes <= 0:
            return None
        size = _up(nbytes, ROUND)
        pool = (stream, size <= SMALL)
        block = self._best_fit(pool, size) or self._new_segment(pool, size)
        block.free = False
        if block.size > size:
            self._split(block, size)
        self.allocated += block.size
        return block

    def free(self, block: MemoryBlock | None) -> None:
        """Free a block from `malloc`; it is merged with free neighbours."""
        if block is None:
            return
        assert not block.free, "freed twice"
        self.allocated -= block.size
        block.free = True
        if block.after is not None and block.after.free:
            self._take(block.after)
            block = self._merge(block, block.after)
        if block.before is not None and block.before.free:
            self._take(block.before)
            block = self._merge(block.before, block)
        insort(self._free[block.pool], block.entry)

    # Blocks.

    def _best_fit(self, pool: tuple[int, bool], size: int) -> MemoryBlock | None:
        """The smallest free block that is large enough; the end of an expandable segment is used last."""
        free = self._free[pool]
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if free[at][2] is self._ends.get(pool) and at + 1 < len(free):
            at += 1
        return free.pop(at)[2]

    def _split(self, block: MemoryBlock, size: int) -> None:
        """Split off the unused rest of a block as a free block, unless it is too small."""
        remaining = block.size - size
        small = block.pool[1] or self.expandable
        if remaining < ROUND if small else remaining <= SMALL:
            return
        rest = self._cut(block, size)
        rest.free = True
        insort(self._free[block.pool], rest.entry)

    def _cut(self, block: MemoryBlock, size: int) -> MemoryBlock:
        """Shorten a block; the rest becomes a separate block."""
        rest = MemoryBlock(
            block.address + size, block.size - size, block.pool, block.free, block, block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        return rest

    def _merge(self, left: MemoryBlock, right: MemoryBlock) -> MemoryBlock:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        if self._ends.get(left.pool) is right:
            self._ends[left.pool] = left
        return left

    def _take(self, block: MemoryBlock) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]

    # Segments.

    def _new_segment(self, pool: tuple[int, bool], size: int) -> MemoryBlock:
        if self.expandable:
            return self._grow(pool, size)
        nbytes = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT if size < LARGE else _up(size, ROUND_SEGMENT)
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.retries += 1
            self.empty_cache()
        self._reserve(nbytes)
        block = MemoryBlock(self._next_address, nbytes, pool)
        self._next_address += nbytes + ROUND_SEGMENT  # segments never touch, so they never merge
        return block

    def _grow(self, pool: tuple[int, bool], size: int) -> MemoryBlock:
        """Add pages at the end of the segment; free space there is used first."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        nbytes = _up(size - self._free_at_end(pool), page)
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.retries += 1
            self.empty_cache()
            nbytes = _up(size - self._free_at_end(pool), page)  # the last pages may have been returned too
        self._reserve(nbytes)
        end = self._ends.get(pool)
        if end is not None and end.free:
            self._take(end)
            end.size += nbytes
            return end
        block = MemoryBlock(self._next_address if end is None else end.address + end.size, nbytes, pool)
        if end is None:
            self._starts[pool] = block.address
            self._next_address += 1 << 44
        else:
            end.after, block.before = block, end
        self._ends[pool] = block
        return block

    def _free_at_end(self, pool: tuple[int, bool]) -> int:
        end = self._ends.get(pool)
        return end.size if end is not None and end.free else 0

    def _reserve(self, nbytes: int) -> None:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            raise OutOfMemory(f"{nbytes} bytes on top of {self.reserved} of {self.capacity}")
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def empty_cache(self) -> None:
        """Return completely free segments to the driver; of expandable segments, the completely free pages."""
        for pool, free in ((pool, free) for pool, free in self._free.items() if pool[0] not in self.private):
            blocks = [block for _, _, block in free]
            if self.expandable:
                for block in blocks:
                    self._unmap(pool, block)
                continue
            unused = {id(block) for block in blocks if block.before is None and block.after is None}
            self.reserved -= sum(block.size for block in blocks if id(block) in unused)
            free[:] = [entry for entry in free if id(entry[2]) not in unused]

    def _unmap(self, pool: tuple[int, bool], block: MemoryBlock) -> None:
        """Return a free block's whole pages. Their addresses stay in use: the segment grows only at its end."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        first = _up(block.address - self._starts[pool], page) + self._starts[pool] - block.address
        nbytes = (block.size - first) // page * page
        if nbytes <= 0:
            return
        self._take(block)
        hole = self._cut(block, first) if first else block
        rest = self._cut(hole, nbytes) if hole.size > nbytes else None
        hole.free = False
        for part in (block if first else None, rest):
            if part is not None:
                insort(self._free[pool], part.entry)
        self.reserved -= nbytes


@dataclass
class Peak:
    """The peak of a run in torch's allocator."""

    allocated: int
    reserved: int
    """Bytes reserved from the driver, which other processes can't use."""
    by_category: dict[str, int]
    """The allocated bytes by purpose; they add up to `allocated`."""
    step: int
    op: int
    """Index of the operation at the peak."""
    timeline: list[tuple[int, int]]
    """(operation, bytes allocated after it) of the last step."""
    retries: int = 0


# Streams: eager runs compute on stream 0. A run with CUDA graphs computes its first steps on the stream that captures,
# and a captured step takes memory from the graphs' own pool.
COMPUTING, COPYING, CAPTURING, IN_GRAPH = range(4)


class _Replay:
    """Replays the events of a trace on an allocator, and records the peak."""

    def __init__(self, trace: Trace, memory: CachingAllocator):
        self.trace, self.memory = trace, memory
        self.blocks: dict[int, MemoryBlock | None] = {}
        self.by_category: dict[str, int] = defaultdict(int)  # bytes allocated now
        self.batches: list[int] = []  # storages of the last step's batches
        self.stream = COMPUTING
        self.loads = [op.phase == "load" for op in trace.ops]
        self.peak = Peak(0, 0, {}, 0, 0, [])

    def play(self, events: list[Event], step: int, fresh: bool = True) -> None:
        """Without `fresh`, memory that already exists, such as the optimizer's state, is not allocated again."""
        for kind, storage, nbytes, op in events:
            if kind == "free":
                self._free(storage, self.blocks)
            elif kind == "scratch":
                block = self.memory.malloc(nbytes, self._stream_of(op))
                self._record(op, step, 0 if block is None else block.size)
                self.memory.free(block)
            elif fresh or storage not in self.blocks:
                self._alloc(storage, nbytes, self._stream_of(op))
                self._record(op, step)

    def _stream_of(self, op: int) -> int:
        return COPYING if op >= 0 and self.loads[op] else self.stream

    def _alloc(self, storage: int, nbytes: int, stream: int) -> None:
        block = self.blocks[storage] = self.memory.malloc(nbytes, stream)
        if block is not None:
            self.by_category[self.trace.category[storage]] += block.size

    def _free(self, storage: int, blocks: dict[int, MemoryBlock | None]) -> None:
        block = blocks.pop(storage, None)
        if block is not None:
            self.by_category[self.trace.category[storage]] -= block.size
            self.memory.free(block)

    def _record(self, op: int, step: int, scratch: int = 0) -> None:
        if self.memory.allocated > self.peak.allocated:
            self.peak.allocated, self.peak.op, self.peak.step = self.memory.allocated, op, step
            self.peak.by_category = dict(self.by_category)
            if scratch:
                self.peak.by_category["workspaces"] = self.by_category["workspaces"] + scratch
        self.peak.timeline.append((op, self.memory.allocated))

    def step(self, step: StepEvents, again: bool) -> None:
        """One optimizer step."""
        self.load(step)
        self.play(self.trace.events[step.loaded : self._last_use(step)], step.number, fresh=not again)

    def load(self, step: StepEvents) -> None:
        """Load a step's batches while those of the previous step are still in memory."""
        old = {key: self.blocks.pop(key) for key in self.batches if key in self.blocks}
        self.peak.timeline.clear()
        self.play(self.trace.events[step.start : step.loaded], step.number)
        for storage in list(old):
            self._free(storage, old)
        self.batches = unfreed(self.trace.events[step.start : step.loaded])

    def capture(self, step: StepEvents) -> None:
        """Capture a step in a CUDA graph, as `train.graph` does: eager memory is returned, and the graph gets its own.

        Then a batch is loaded for its replay.
        """
        self.load(step)
        workspaces = [n for n in self.blocks if self.trace.category[n] == "workspaces"]
        sizes = [0 if block is None else block.size for block in map(self.blocks.get, workspaces)]
        for storage in workspaces:
            self._free(storage, self.blocks)
        self.memory.empty_cache()
        for nbytes in self.trace.inputs:
            block = self.memory.malloc(nbytes)
            self.by_category["batch"] += 0 if block is None else block.size
        self.stream = IN_GRAPH
        self.memory.private.add(IN_GRAPH)
        stays = self.trace.kept_by_graph
        events = self.trace.events[step.loaded : self._last_use(step)]
        events = [event for event in events if event.kind != "free" or event.storage not in stays]
        ops = self.trace.ops
        backward = (n for n, e in enumerate(events) if e.op >= 0 and ops[e.op].phase == "backward")
        begin = next(backward, len(events))
        # cuBLAS has a workspace for each of the two threads, from its first matrix product on
        for part, thread in ((events[:begin], slice(0, 1)), (events[begin:], slice(1, None))):
            for storage, nbytes in zip(workspaces[thread], sizes[thread]):
                self._alloc(storage, nbytes, IN_GRAPH)
            self.play(part, step.number, fresh=False)
        self.stream, captured = CAPTURING, list(self.peak.timeline)
        self.load(step)
        self.peak.timeline = captured

    def _last_use(self, step: StepEvents) -> int:
        """The trace frees its batches at the very end of the step; a run frees them when it has the next ones."""
        events, batches, at = self.trace.events, set(self.batches), step.end
        while at > step.loaded and events[at - 1].kind == "free" and events[at - 1].storage in batches:
            at -= 1
        return at


def replay(
    trace: Trace,
    steps: int = 3,
    *,
    capacity: int | None = None,
    expandable: bool = False,
    graph: bool = False,
) -> Peak:
    """The peak of a run's first steps; from the third on, all are equal. Raises `OutOfMemory` above the capacity.

    `graph`: after these steps of each phase, one is captured in a CUDA graph, which is replayed from there on.
    """
    memory = CachingAllocator(capacity, expandable)
    player = _Replay(trace, memory)
    player.play(trace.events[: trace.built], 0)
    if graph:
        _play_graphs(player, steps)
    else:
        for number in range(max(steps, len(trace.steps))):
            traced = min(number, len(trace.steps) - 1)
            player.step(trace.steps[traced], again=number > traced)
    player.peak.reserved, player.peak.retries = memory.peak_reserved, memory.retries
    player.peak.by_category = {key: value for key, value in player.peak.by_category.items() if value}
    return player.peak


def _play_graphs(player: _Replay, eager: int) -> None:
    """Some eager steps of each phase, then a captured one. A phase with a graph key of an earlier one needs none."""
    player.stream = CAPTURING
    captured: set[Hashable] = set()
    for step in player.trace.steps:
        if step.graph_key in captured:
            continue
        for number in range(eager):
            player.step(step, again=number > 0)
        if step.graph_key is not None:
            captured.add(step.graph_key)
            player.capture(step)


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple

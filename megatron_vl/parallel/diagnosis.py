"""Says which rank is at fault when ranks have died, or when no rank makes progress."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field

from megatron_vl.system import progress
from megatron_vl.system.processes import RankProcess
from megatron_vl.system.progress import RankProgress

_MAX_NAMED_RANKS = 8


@dataclass
class Heartbeat:
    """The latest line of a rank, and when it arrived."""

    rank: int
    rank_process: RankProcess
    rank_progress: RankProgress
    received_at: float = field(default_factory=time.monotonic)
    """When the line arrived, by this process's monotonic clock in seconds."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Heartbeat:
        """The inverse of :meth:`to_line`, for a line that has just arrived.

        Raises ValueError, KeyError or TypeError for any other line.
        """
        fields = json.loads(line)
        process = RankProcess(**fields["rank_process"])
        rank_progress = RankProgress(**fields["rank_progress"])
        return Heartbeat(int(fields["rank"]), process, rank_progress)


@dataclass(frozen=True)
class RunFailure:
    """Why a training run ends."""

    rank: int
    """The rank that failed, the first one if there are several. The empty message of an orderly end also has
    a rank."""
    message: str
    position_text: str = ""
    """The rank's coordinates in the layout, its step, and its phase; empty before the layout is known."""
    silent: tuple[int, ...] = ()
    """Ranks that are dead or stopped. No rank needs to wait for them."""
    processes: tuple[RankProcess, ...] = ()
    """Processes of the ranks that are dead, are stopped, or hang, as far as they are known."""
    has_died: bool = False
    is_hanging: bool = False
    """Whether the rank is alive but makes no progress."""
    has_traceback_hint: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> RunFailure:
        fields = json.loads(text)
        processes = tuple(RankProcess(**process) for process in fields["processes"])
        return RunFailure(**{**fields, "silent": tuple(fields["silent"]), "processes": processes})


def diagnose_dead_ranks(dead_ranks: list[int], heartbeats: dict[int, Heartbeat]) -> RunFailure:
    """The diagnosis of ranks whose connections have ended."""
    dead_ranks = sorted(dead_ranks)
    first = heartbeats.get(dead_ranks[0])
    return RunFailure(
        dead_ranks[0],
        f"{first.rank_process if first else 'the process'} ended without a message: it was killed from"
        f" outside (SIGKILL), or crashed in native code{_other_ranks_text(dead_ranks)}",
        progress.describe_progress(first.rank_progress) if first else "",
        tuple(dead_ranks),
        tuple(heartbeats[rank].rank_process for rank in dead_ranks if rank in heartbeats),
        has_died=True,
    )


def diagnose_hang(
    heartbeats: dict[int, Heartbeat], idle_s: float, silence_limit_s: float, timeout_s: float
) -> RunFailure:
    """The diagnosis of a run in which no rank has made progress for ``idle_s``.

    It names the ranks that sent no lines, because they are stopped or their node is lost. If there are none,
    it names the ranks with the least progress, because the others wait for them.

    Args:
        silence_limit_s: a rank whose latest heartbeat is older, in seconds, is considered stopped.
    """
    limit_hint = f"If the run did not hang, raise failures.timeout_s ({timeout_s:g}; 0: no limit)"
    heard_since = time.monotonic() - silence_limit_s
    silent_ranks = sorted(rank for rank, each in heartbeats.items() if each.received_at < heard_since)
    least_progress = min(map(_progress_order, heartbeats.values()))
    slowest_ranks = sorted(
        rank for rank, each in heartbeats.items() if _progress_order(each) == least_progress
    )
    blamed_ranks = silent_ranks or (slowest_ranks if len(slowest_ranks) < len(heartbeats) else [])
    first = heartbeats[(blamed_ranks or slowest_ranks)[0]]
    process, others = first.rank_process, _other_ranks_text(blamed_ranks)

    if silent_ranks:
        state = process.system_state()
        state_text = f"its state is {state!r}" if state else "it is stopped, or its node is lost"
        silent_s = time.monotonic() - first.received_at
        message = f"no sign of life for {silent_s:.0f} s: {state_text} ({process}){others}. {limit_hint}"
    else:
        same_phase = ", and all ranks are in the same phase" if len(heartbeats) > 1 else ""
        waiting_text = f"no rank has made progress for {idle_s:.0f} s{same_phase}"
        if blamed_ranks:
            waiting_text = f"it has made no progress for {idle_s:.0f} s, and the others wait for it{others}"
        syncing = first.rank_progress.syncing_file
        advice = _ADVICE_BY_PHASE.get(first.rank_progress.phase, "")
        disk_text = f"The disk has not confirmed {syncing} (fsync). " if syncing else ""
        message = f"{waiting_text} ({process}). {disk_text}{advice}{limit_hint}"

    return RunFailure(
        first.rank,
        message,
        progress.describe_progress(first.rank_progress),
        silent=tuple(silent_ranks),
        processes=tuple(heartbeats[rank].rank_process for rank in blamed_ranks),
        is_hanging=not silent_ranks,
    )


def _progress_order(heartbeat: Heartbeat) -> tuple[int, int, bool, bool]:
    """A value that is the larger, the further a rank is."""
    rank_progress = heartbeat.rank_progress
    return (
        rank_progress.step,
        progress.PHASES.index(rank_progress.phase) if rank_progress.phase in progress.PHASES else 0,
        not rank_progress.syncing_file,
        rank_progress.background_task != progress.WRITING_CHECKPOINT,
    )


_ADVICE_BY_PHASE = {
    progress.SETTING_UP: "Look at the file systems of model.hf, model.checkpoint and checkpoint.dir. ",
    progress.LOADING_ROWS: "Look at the file system of data.path and at the loader's worker processes. ",
    progress.SHARING_ROWS: "Look at the network between the ranks. ",
    progress.FORWARD_BACKWARD: (
        "Look at the GPUs (dmesg shows Xid errors) and the network; NCCL_DEBUG=INFO shows its connections. "
    ),
    progress.UPDATING_WEIGHTS: "Look at the GPUs (dmesg shows Xid errors) and the network. ",
    progress.SAVING_CHECKPOINT: "Look at the file system of checkpoint.dir. ",
    progress.RUNNING_EVALUATION: "Look at the GPUs and the network; eval.interval 0 turns evaluations off. ",
}


def _other_ranks_text(affected_ranks: list[int]) -> str:
    """Text about all ranks but the first, such as ``; the same holds for rank 4, 5 and 6 more``, or empty."""
    return f"; the same holds for {list_ranks(affected_ranks[1:])}" if affected_ranks[1:] else ""


def list_ranks(ranks: list[int], kind: str = "rank") -> str:
    """Names ranks, or nodes, for instance ``rank 4, 5 and 6 more``."""
    more_text = f" and {len(ranks) - _MAX_NAMED_RANKS} more" if len(ranks) > _MAX_NAMED_RANKS else ""
    return f"{kind} {', '.join(map(str, ranks[:_MAX_NAMED_RANKS]))}{more_text}"

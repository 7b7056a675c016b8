"""What differs between the blend of a checkpoint and that of the run that goes on, in words."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.data.source.blend import LISTED, Source

ALONE = "the only data set"
"""What stands in place of a weight for a data set that is not blended."""


@dataclass(frozen=True)
class BlendChange:
    """What differs between the blend of a checkpoint and that of the run."""

    before: tuple[Source, ...]
    now: tuple[Source, ...]
    begun: frozenset[str] = frozenset()
    """What all sources are known by that were ever in the run's blend."""

    @property
    def stays(self) -> bool:
        """Whether a source of before is still there."""
        return bool({source.key for source in self.before} & {source.key for source in self.now})

    def told(self) -> list[str]:
        """What happens to each source, one line for each; those to which nothing happens share a line."""
        old = {source.key: source for source in self.before}
        lines = []
        same = []
        for source in self.now:
            line = self._of(source, old.pop(source.key, None))
            if line:
                lines.append(line)
            else:
                same.append(source.name)
        lines += [f"{source.name} is left out; its counts are kept" for source in old.values()]

        more = len(lines) - LISTED
        lines = lines[:LISTED] + ([f"{more} more sources change"] if more > 0 else [])
        if same:
            who = same[0] if len(same) == 1 else f"{len(same)} sources"
            lines.append(f"{who} as before, from where the checkpoint stands")
        return lines

    def _of(self, source: Source, before: Source | None) -> str:
        """What happens to a source of the run; empty if nothing does."""
        given = source.given or ALONE
        share = f"{given}, {source.share:.1%} of the samples expected"
        if before is None:
            if source.key in self.begun:
                return f"{source.name} is back and goes on where it was when it left: {share}"
            known = any(one.name == source.name for one in self.before)
            other = " (another data set than the one that had this name)" if known else ""
            return f"{source.name} is new{other} and begins at its start: {share}"

        renamed = source.name != before.name and bool(before.given)  # a set alone has no name in a checkpoint
        name = f"{source.name}, which was {before.name}," if renamed else source.name
        if not source.share and before.share:
            return f"nothing is drawn from {name} any more ({source.given}); its position is kept"
        if source.given != before.given:
            was = f"{before.given or ALONE} ({before.share:.1%})"
            return f"{name} goes on where it is: {was} becomes {given} ({source.share:.1%})"
        if f"{source.share:.1%}" != f"{before.share:.1%}":
            shares = f"{source.share:.1%} of the samples expected, after {before.share:.1%}"
            return f"{name} goes on where it is: {given}, {shares}"
        return f"{name} goes on where it is" if renamed else ""

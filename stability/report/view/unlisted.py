"""A sentence on the runs of a study's folder that the study no longer lists."""

from stability.analysis.study_records import RecordedStudy

__all__ = ["unlisted_runs"]


def unlisted_runs(study: RecordedStudy) -> str:
    """Return which runs on disk are no longer in the study; empty if there are none."""
    named = [
        f"{arm} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"
        for arm, seeds in study.unlisted.items()
    ]
    return f"On disk, but no longer in the study: {'; '.join(named)}." if named else ""

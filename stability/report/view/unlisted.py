"""A sentence on the runs of a study's folder that the study does not list."""

from stability.analysis.study_records import RecordedStudy

__all__ = ["unlisted_runs"]


def unlisted_runs(study: RecordedStudy) -> str:
    """Return which runs on disk the study does not list; empty if there are none.

    They are of an arm or a seed that was taken out of its YAML file, or of a recorded arm that has
    failed.
    """
    named = [
        f"{arm} (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"
        for arm, seeds in study.unlisted.items()
    ]
    return f"On disk, but not in the study: {'; '.join(named)}." if named else ""

"""Analysis: records in, dataclasses and plain sentences out."""

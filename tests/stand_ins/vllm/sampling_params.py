"""A stand-in; see the package."""

from dataclasses import dataclass


@dataclass
class StructuredOutputsParams:
    regex: str | None = None


GuidedDecodingParams = StructuredOutputsParams  # as releases before 0.11 call it

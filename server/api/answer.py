"""The base of every JSON answer's model: what a route returns and the OpenAPI document says."""

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A JSON answer, or a part of one.

    Each text and number has an example (`Field(examples=[...])`), from which the OpenAPI document
    makes the answer's. A field without a value is null, never left out. Nothing is converted: a
    value of another type is a fault of ours.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        json_schema_serialization_defaults_required=True,
        defer_build=True,  # the first answer of a kind builds its model, no start builds all
    )

"""CloudEvents 1.0: a line is an event that follows the specification and its JSON format.

https://github.com/cloudevents/spec, tag v1.0.2: spec.md, formats/json-format.md, cloudevents.json.
"""

import json
import re
from datetime import datetime

from server.billing.exports import cloud_events
from tests.server.receipt_makers import make_rows, seal

RECEIPTS = seal(make_rows(seed=5, count=30))
EVENTS = [json.loads(line) for line in cloud_events.encode(RECEIPTS).splitlines()]

# The JSON schema's required attributes, and its attributes that are non-empty strings.
REQUIRED = {"id", "source", "specversion", "type"}
TEXTS = REQUIRED | {"datacontenttype", "dataschema", "subject", "time", "data_base64"}


def test_every_event_has_what_is_required_and_nothing_that_is_not_an_attribute():
    for event in EVENTS:
        assert event.keys() >= REQUIRED
        assert event.keys() <= TEXTS | {"data"}
        assert all(re.fullmatch("[a-z0-9]{1,20}", name) for name in event)
        assert all(isinstance(event[name], str) and event[name] for name in event.keys() & TEXTS)
        assert event["specversion"] == "1.0"


def test_source_is_a_uri_time_has_a_zone_and_the_data_is_what_its_type_says():
    for event in EVENTS:
        assert re.fullmatch(r"urn:[a-z0-9][a-z0-9-]{1,31}:[^\s]+", event["source"])
        assert datetime.fromisoformat(event["time"]).utcoffset() is not None
        assert event["datacontenttype"] == "application/json"
        assert isinstance(event["data"], dict)


def test_source_and_id_name_an_entry_once():
    names = {(event["source"], event["id"]) for event in EVENTS}
    assert len(names) == len(RECEIPTS)


def test_an_event_is_about_its_tenant_and_carries_the_receipt():
    for event, receipt in zip(EVENTS, RECEIPTS, strict=True):
        assert event["type"] == "chorale.ledger.entry.v1"
        assert (event["id"], event["subject"]) == (str(receipt["entry_id"]), receipt["tenant_id"])
        assert event["time"] == receipt["posted_at"]
        assert event["data"] == receipt

"""The OpenAPI document of the server: a validator of its own accepts it, and real responses fit its schemas."""

import copy
import json
import subprocess
import urllib.request

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from openapi_spec_validator.validation.exceptions import OpenAPIValidationError

from conftest import TOKENS


@pytest.fixture(scope="module")
def document(server):
    with urllib.request.urlopen(server.url("/openapi.json"), timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        return json.load(answer)


def test_the_document_is_valid(document):
    assert document["openapi"].startswith("3.1.")
    validate(document)
    # The control: the validator finds a fault.
    broken = copy.deepcopy(document)
    broken["paths"]["/rpc"]["post"]["responses"] = {"200": {}}
    with pytest.raises(OpenAPIValidationError):
        validate(broken)


def schema(document, name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


def test_examples_and_real_responses_fit_their_schemas(server, document):
    body = document["paths"]["/rpc"]["post"]["requestBody"]["content"]["application/json"]
    assert len(body["examples"]) == len(body["schema"]["oneOf"]) > 50
    for name, example in body["examples"].items():
        schema(document, name).validate(example["value"])

    def call(method: str, **params) -> dict:
        request = {"method": method, "params": params}
        schema(document, method).validate(request)
        token = f"Authorization: Bearer {TOKENS['ann']}"
        said = subprocess.run(
            ["curl", "-sS", server.url("/rpc"), "-H", token, "-d", json.dumps(request)],
            capture_output=True, text=True, timeout=120, check=True,
        )
        return json.loads(said.stdout)

    spec = {"box_id": "openapi"}
    for method, params in [
        ("system.health", {}),
        ("system.status", {}),
        ("box.create", {"spec": spec}),
        ("box.list", {}),
        ("box.get", {"box_id": "openapi"}),
        ("box.exec", {"spec": {**spec, "cmd": "echo hello"}}),
        ("file.write", {"box_id": "openapi", "path": "/tmp/x", "data": "aGVsbG8="}),
        ("file.stat", {"box_id": "openapi", "paths": ["/tmp/x"]}),
        ("command.list", {"box_id": "openapi"}),
        ("box.delete", {"box_id": "openapi"}),
    ]:
        answer = call(method, **params)
        schema(document, f"{method}.response").validate(answer)
    failed = call("box.get", box_id="openapi")
    schema(document, "Error").validate(failed)
    assert not schema(document, "box.get.response").is_valid(failed)

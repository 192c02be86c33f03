"""What is asked of AWS KMS is valid by the published model of its API. The service itself was never run."""

from __future__ import annotations

import datetime

import pytest

from kvcustody.errors import KeyringError, KeyServiceUnavailable
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.integrations.key_services.places import AwsPlace

boto3 = pytest.importorskip("boto3")
stub = pytest.importorskip("botocore.stub")
NAME, ALIAS, KEY = "kvcustody-1", "alias/kvcustody-1", "1234abcd-12ab-34cd-56ef-1234567890ab"
CONTEXT = {"kvcustody": "Y29udGV4dA=="}
DATE = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)


def test_requests_and_answers_are_of_the_published_model() -> None:
    from kvcustody.integrations.key_services.aws_kms import AwsKms

    place = AwsPlace(service="aws-kms", region="eu-central-1", destroy_days=9)
    client = boto3.client("kms", region_name=place.region, aws_access_key_id="a", aws_secret_access_key="b")
    with stub.Stubber(client) as answers:
        metadata = {"KeyMetadata": {"KeyId": KEY}}
        answers.add_client_error("describe_key", "NotFoundException", expected_params={"KeyId": ALIAS})
        how = {"Description": stub.ANY, "KeyUsage": "ENCRYPT_DECRYPT"}
        answers.add_response("create_key", metadata, how)
        answers.add_response("create_alias", {}, {"AliasName": ALIAS, "TargetKeyId": KEY})
        sealing = {"KeyId": ALIAS, "Plaintext": stub.ANY, "EncryptionContext": CONTEXT}
        answers.add_response("encrypt", {"CiphertextBlob": b"sealed"}, sealing)
        opening = {"KeyId": ALIAS, "CiphertextBlob": b"sealed", "EncryptionContext": CONTEXT}
        answers.add_response("decrypt", {"Plaintext": bytes(range(KEY_BYTES))}, opening)
        answers.add_response("describe_key", metadata, {"KeyId": ALIAS})
        scheduling = {"KeyId": KEY, "PendingWindowInDays": 9}
        answers.add_response("schedule_key_deletion", {"KeyId": KEY, "DeletionDate": DATE}, scheduling)
        pending = {"KeyMetadata": {"KeyId": KEY, "DeletionDate": DATE}}
        answers.add_response("describe_key", pending, {"KeyId": ALIAS})
        answers.add_client_error("decrypt", "InvalidCiphertextException")
        answers.add_client_error("list_keys", "ThrottlingException")
        service = AwsKms(place, client)
        service.make_key(NAME)
        with KeyBuffer.random(KEY_BYTES) as secret:
            assert service.wrap(NAME, secret, b"context") == b"sealed"
        assert bytes(service.unwrap(NAME, b"sealed", b"context").view()) == bytes(range(KEY_BYTES))
        until_us = int(DATE.timestamp()) * 1_000_000
        assert service.end_key(NAME).until_us == service.end_key(NAME).until_us == until_us
        with pytest.raises(KeyringError, match="InvalidCiphertext"):
            service.unwrap(NAME, b"other", b"context")
        with pytest.raises(KeyServiceUnavailable):
            service.probe()
        answers.assert_no_pending_responses()

"""A real S3 server (moto) with one bucket and one user, whose signatures it checks; for an environment of its own.

It prints its address and the user's key as JSON, then answers lines: `objects` with what is in the bucket, and
`put KEY TEXT` by putting that there. It ends with its input.
"""

from __future__ import annotations

import json
import sys
from http.client import HTTPConnection

import boto3
from moto.server import ThreadedMotoServer

ALLOWED = [{"Effect": "Allow", "Action": ["s3:PutObject", "s3:GetObject"], "Resource": "*"}]


def main() -> None:
    """Serve until the input ends."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    login = {"aws_access_key_id": "setup", "aws_secret_access_key": "setup"}
    ask = {"endpoint_url": address, "region_name": "us-east-1", **login}

    def check_after(actions: int) -> None:
        connection = HTTPConnection(host, port)  # without a content type, which moto would read by
        connection.request("POST", "/moto-api/reset-auth", body=str(actions).encode())
        assert connection.getresponse().status == 200
        connection.close()

    check_after(10_000)
    iam, s3 = boto3.client("iam", **ask), boto3.client("s3", **ask)
    s3.create_bucket(Bucket="reports")
    iam.create_user(UserName="kvcustody")
    document = json.dumps({"Version": "2012-10-17", "Statement": ALLOWED})
    iam.put_user_policy(UserName="kvcustody", PolicyName="p", PolicyDocument=document)
    key = iam.create_access_key(UserName="kvcustody")["AccessKey"]
    check_after(0)
    print(json.dumps([address, key["AccessKeyId"], key["SecretAccessKey"]]), flush=True)
    for line in sys.stdin:
        check_after(10_000)
        if line.startswith("put "):
            _, name, text = line.split()
            s3.put_object(Bucket="reports", Key=name, Body=text.encode())
        found = {}
        for each in s3.list_objects_v2(Bucket="reports").get("Contents", []):
            body = s3.get_object(Bucket="reports", Key=each["Key"])["Body"].read()
            found[each["Key"]] = body.decode("latin-1")
        check_after(0)
        print(json.dumps(found), flush=True)
    server.stop()


if __name__ == "__main__":
    main()

"""Addresses that webhooks call, and those that they do not; signatures as Standard Webhooks has them."""

from __future__ import annotations

import pytest

from serve.webhooks.call import Forbidden, checked_url, is_public, new_secret, secret_key, signature, target_of


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "2001:db8::1", "nonsense",
    ],
)  # fmt: skip
def test_addresses_that_only_we_reach(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_addresses_of_the_internet(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    ["", "x", "http://", "ftp://a/", "file:///etc/passwd", "http://a b/", "http://a/\r\nX: y", "http://u@a/", "http://a:0/",
     "http://a:99999/", "http://a/#f", "http://[::1/", "http://" + "a" * 3_000 + "/",
     "http://☃.net/", "http://" + "ü" * 70 + ".de/", "http://\u200d.de/"],
)  # fmt: skip
def test_what_is_no_url_of_a_webhook(url: str) -> None:
    with pytest.raises(Forbidden):
        checked_url(url)


async def test_a_request_goes_to_the_address_that_was_judged() -> None:
    assert checked_url("https://Bücher.example:81/ü").netloc == "xn--bcher-kva.example:81"
    assert checked_url("http://[::1]/").netloc == "[::1]"
    target = await target_of("http://localhost:81/a?b=c", private=True)
    assert target.url in ("http://127.0.0.1:81/a?b=c", "http://[::1]:81/a?b=c")
    assert (target.host, target.name) == ("localhost:81", "localhost")
    with pytest.raises(Forbidden, match="not on the public internet"):
        await target_of("http://localhost:81/", private=False)
    with pytest.raises(Forbidden, match="no address"):
        await target_of("http://no-such-host.invalid/", private=True)


def test_a_signature_of_the_specification() -> None:
    """The example of the Standard Webhooks reference implementations."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert len(secret_key(new_secret())) == 32
    for wrong in ("", "x", "whsec_", "whsec_!!", "whsec_YQ==", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"):
        with pytest.raises(ValueError):
            secret_key(wrong)

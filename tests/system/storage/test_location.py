import pytest

from hyena_jax.system.errors import UserError
from hyena_jax.system.storage.location import Location


@pytest.mark.parametrize(
    ("url", "bucket", "name"),
    [
        ("gs://abc", "abc", ""),
        ("gs://abc/", "abc", ""),
        ("gs://my-bucket.x/runs/1/", "my-bucket.x", "runs/1"),
        ("gs://abc/model.pattern=hawk,hyena/seed=0", "abc", "model.pattern=hawk,hyena/seed=0"),
        ("gs://abc/..x/.y", "abc", "..x/.y"),
    ],
)
def test_a_url_is_read_and_written(url, bucket, name):
    location = Location.parse(url, "workdir")
    assert location == (bucket, name)
    assert str(location) == url.rstrip("/")
    assert Location.parse(str(location), "workdir") == location


@pytest.mark.parametrize(
    "url",
    "gs:// gs://ab/x gs:/abc/x gs://abc//x gs://abc/../x gs://abc/x/. gs://ABC/x s3://abc/x".split()
    + [f"gs://abc/{c}" for c in ("a b", "a*", "a#1", "a?b", "[a]", "a%20", "ä", "a\nb", "a" * 256)],
)
def test_any_other_url_is_refused(url):
    with pytest.raises(UserError, match="workdir must be gs://BUCKET/NAME"):
        Location.parse(url, "workdir")


def test_the_name_of_something_inside():
    assert str(Location.parse("gs://abc", "x") / "run") == "gs://abc/run"
    assert Location.parse("gs://abc/run", "x") / "checkpoints/1" == Location("abc", "run/checkpoints/1")

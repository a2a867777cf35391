"""The library's publishing half: turns live parameters into versions in the bucket."""

#!/usr/bin/env python3
"""Builds and runs tests/extension, a crate outside the workspace, with the libraries that the workspace has built.

`cargo test --manifest-path tests/extension/Cargo.toml` does the same without this script, but takes minutes. To Cargo, path dependencies of
another workspace are different packages, so it builds them again, with all their C++. This script asks Cargo where the workspace's libraries
are, and calls rustc. Arguments go to the test programs.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
CRATE = REPOSITORY / "tests/extension"
FLAGS = ["--edition=2024", "-Copt-level=1", "-Dwarnings"]


def artifacts(command):
    """The libraries of a build by package name, and the folders of native libraries."""
    build = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    libraries, native = {}, []
    for message in map(json.loads, build.stdout.splitlines()):
        if message["reason"] == "build-script-executed":
            native += [path.removeprefix("native=") for path in message["linked_paths"]]
        if message["reason"] != "compiler-artifact" or "lib" not in message["target"]["kind"]:
            continue
        # path+file:///folder/name#version, path+file:///folder#name@version, registry+https://index#name@version
        source, _, version = message["package_id"].partition("#")
        name = version.split("@")[0] if "@" in version else source.rsplit("/", 1)[1]
        rlibs = [path for path in message["filenames"] if path.endswith(".rlib")]
        libraries.setdefault(name, {}).update({path: message["target"]["name"] for path in rlibs})
    return libraries, native


def main():
    manifest = CRATE / "Cargo.toml"
    # What Cargo reports about the manifest and its lock file.
    subprocess.run(["cargo", "metadata", "--quiet", "--locked", "--format-version=1", "--manifest-path", manifest], stdout=subprocess.DEVNULL, check=True)
    # With the same features as in scripts/test.sh.
    libraries, native = artifacts(["cargo", "build", "--quiet", "--workspace", "--release", "--locked", "--bins", "--examples", "--message-format=json-render-diagnostics"])
    wanted = tomllib.loads(manifest.read_text())
    options = [option for path in native for option in ("-L", f"native={path}")]
    for package in [*wanted["dependencies"], *wanted["dev-dependencies"]]:
        (path, name), *others = libraries[package].items()
        if others:
            sys.exit(f"extension: {package} has been built {len(others) + 1} times, with different features")
        options += ["--extern", f"{name.replace('-', '_')}={path}", "-L", f"dependency={pathlib.Path(path).parent}"]
    environment = os.environ | {"CARGO_MANIFEST_DIR": str(CRATE)}
    with tempfile.TemporaryDirectory() as folder:

        def rustc(*arguments):
            subprocess.run(["rustc", *FLAGS, *arguments, *options, "--out-dir", folder], cwd=CRATE, env=environment, check=True)

        rustc("--crate-type=rlib", "--crate-name=extension", "src/lib.rs")
        options.extend(["--extern", f"extension={folder}/libextension.rlib"])
        for test in sorted((CRATE / "tests").glob("*.rs")):
            rustc("--test", f"--crate-name={test.stem}", str(test.relative_to(CRATE)))
            subprocess.run([f"{folder}/{test.stem}", "--quiet", *sys.argv[1:]], cwd=CRATE, env=environment, check=True)


main()

use super::*;
use std::ffi::CString;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

fn fifo(path: &Path) {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the name is a C string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

fn put(path: &Path, text: &str) -> std::io::Result<()> {
    write(path, |out| out.write_all(text.as_bytes()))
}

/// The names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_is_replaced_as_a_whole_and_keeps_its_permissions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    put(&path, "one").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    put(&path, "two").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "two");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);

    let cut_off = write(&path, |out| {
        out.write_all(&[b'x'; 1 << 20])?;
        Err(ErrorKind::StorageFull.into())
    });
    assert_eq!(cut_off.unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(fs::read_to_string(&path).unwrap(), "two", "an error leaves the old file");
    assert_eq!(names(folder.path()), ["out.json"], "and nothing beside it");
}

#[test]
fn files_of_others_are_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    // Names that temporary files of this process could have.
    let mut others = vec!["out.json.part".to_string()];
    others.extend((0..200).map(|number| format!(".mpk-{}-{number}", std::process::id())));
    for name in &others {
        fs::write(folder.path().join(name), "theirs").unwrap();
    }
    check(&path).unwrap();
    put(&path, "ours").unwrap();
    others.iter().for_each(|name| {
        assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), "theirs", "{name}");
    });
    assert_eq!(names(folder.path()).len(), others.len() + 1);
}

#[test]
fn links_are_followed_and_stay() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("real/deep")).unwrap();
    symlink("real/deep", at("folder")).unwrap();
    fs::write(at("real/there"), "old").unwrap();
    // A link is relative to its own folder, not to where a link to that folder is.
    symlink("../there", at("real/deep/existing")).unwrap();
    symlink("../absent", at("real/deep/dangling")).unwrap();
    symlink(at("folder/existing"), at("twice")).unwrap();
    for (name, target) in
        [("folder/existing", "real/there"), ("folder/dangling", "real/absent"), ("twice", "real/there")]
    {
        check(&at(name)).unwrap();
        put(&at(name), name).unwrap();
        assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink(), "{name}");
        assert!(fs::symlink_metadata(at(target)).unwrap().is_file(), "{target}");
        assert_eq!(fs::read_to_string(at(target)).unwrap(), name);
    }
    symlink("loop", at("loop")).unwrap();
    assert_eq!(failed("loop", &put(&at("loop"), "x").unwrap_err()).status, 2);
}

#[test]
fn devices_and_fifos_are_written_to() {
    put(Path::new("/dev/null"), "x").unwrap();
    check(Path::new("/dev/full")).unwrap();
    let full = put(Path::new("/dev/full"), "x").unwrap_err();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    for device in ["/dev/null", "/dev/full"] {
        assert!(fs::metadata(device).unwrap().file_type().is_char_device(), "{device} is no device any more");
    }

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    fifo(&path);
    check(&path).unwrap();
    let reader = std::thread::spawn({
        let path = path.clone();
        move || {
            let mut text = String::new();
            fs::File::open(path).unwrap().read_to_string(&mut text).unwrap();
            text
        }
    });
    // More than a pipe holds.
    let long = "abc".repeat(100_000);
    put(&path, &long).unwrap();
    assert!(reader.join().unwrap() == long);
    assert!(fs::metadata(&path).unwrap().file_type().is_fifo());
}

/// A file that a shell opened with `> file` keeps its content and its readers.
#[test]
fn an_open_file_is_appended_to() {
    use std::os::fd::AsRawFd;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let mut file = fs::File::create(&path).unwrap();
    file.write_all(b"first ").unwrap();
    put(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), "second").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "first second");
    assert_eq!(file.metadata().unwrap().len(), 12, "it is the same file");
}

#[test]
fn places_that_cannot_be_written_are_found_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("no/such/file"), folder.path().into(), "/proc/trace".into()] {
        let error = check(&path).unwrap_err();
        let error = failed(path.display(), &error);
        assert_eq!(error.status, 2, "{}", error.message);
    }
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_full_disk_and_every_limit_are_the_environments() {
    for code in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG, libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
        let error = std::io::Error::from_raw_os_error(code);
        assert_eq!(failed("x", &error).status, 3, "{error}");
        assert_eq!(crate::model::error::InputError::unreadable("x", error).exit_status(), 3);
    }
    assert_eq!(failed("x", &std::io::Error::from_raw_os_error(libc::EIO)).status, 4);
}

#[test]
fn inputs_that_are_not_regular_files_are_refused_unread() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    fifo(&path);
    symlink(&path, folder.path().join("link")).unwrap();
    let begin = Instant::now();
    for (place, kind) in [
        (path.clone(), "a FIFO"),
        (folder.path().join("link"), "a FIFO"),
        (folder.path().into(), "a folder"),
        ("/dev/zero".into(), "a device"),
    ] {
        for error in
            [read(&place).unwrap_err(), open(&place).unwrap_err(), read_if_there(&place).unwrap_err()]
        {
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains(kind), "{error}");
        }
    }
    assert!(begin.elapsed() < Duration::from_secs(2));
    assert!(read_if_there(&folder.path().join("nothing")).unwrap().is_none());
    assert_eq!(read(&folder.path().join("nothing")).unwrap_err().exit_status(), 2);
    fs::write(folder.path().join("file"), "text").unwrap();
    assert_eq!(read(&folder.path().join("file")).unwrap(), b"text");
}

/// An interrupted download leaves links to nothing in the Hugging Face cache.
#[test]
fn a_link_to_nothing_is_not_a_missing_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    symlink("../blobs/0123", &path).unwrap();
    assert!(is_there(&path) && !is_there(&folder.path().join("other.json")));
    for error in [read(&path).unwrap_err(), open(&path).unwrap_err(), read_if_there(&path).unwrap_err()] {
        assert_eq!(error.exit_status(), 2);
        assert!(error.to_string().ends_with("a link to ../blobs/0123, which does not exist"), "{error}");
    }
}

#[test]
fn a_text_file_of_more_than_a_gigabyte_is_not_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 40).unwrap();
    assert!(read(file.path()).unwrap_err().to_string().contains("too many"));
}

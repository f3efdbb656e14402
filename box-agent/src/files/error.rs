//! What the system's errors mean to whoever asked.

use box_protocol::actions::FileFault;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use rustix::io::Errno;

/// Every error of the system that is told apart: its word, its name, and what it says.
const TABLE: [(Errno, Code, &str, &str); 26] = [
    (Errno::NOENT, Code::NotFound, "ENOENT", "not there"),
    (Errno::ACCESS, Code::Denied, "EACCES", "not allowed"),
    (Errno::PERM, Code::Denied, "EPERM", "not allowed"),
    (Errno::ROFS, Code::Denied, "EROFS", "read-only"),
    (Errno::ISDIR, Code::Validation, "EISDIR", "a directory"),
    (
        Errno::NOTDIR,
        Code::Validation,
        "ENOTDIR",
        "not a directory",
    ),
    (
        Errno::LOOP,
        Code::Validation,
        "ELOOP",
        "too many links, or one that must not be followed",
    ),
    (
        Errno::NAMETOOLONG,
        Code::Validation,
        "ENAMETOOLONG",
        "too long a name",
    ),
    (
        Errno::INVAL,
        Code::Validation,
        "EINVAL",
        "not a place for this",
    ),
    (Errno::NXIO, Code::Validation, "ENXIO", "not a file"),
    (Errno::NODEV, Code::Validation, "ENODEV", "not a file"),
    (Errno::SPIPE, Code::Validation, "ESPIPE", "not a file"),
    (Errno::XDEV, Code::Validation, "EXDEV", "leaves the tree"),
    (Errno::EXIST, Code::Conflict, "EEXIST", "there already"),
    (Errno::NOTEMPTY, Code::Conflict, "ENOTEMPTY", "not empty"),
    (Errno::BUSY, Code::Conflict, "EBUSY", "in use"),
    (Errno::TXTBSY, Code::Conflict, "ETXTBSY", "being run"),
    (Errno::NOSPC, Code::Capacity, "ENOSPC", "no room"),
    (Errno::DQUOT, Code::Capacity, "EDQUOT", "no room"),
    (Errno::FBIG, Code::Capacity, "EFBIG", "too large a file"),
    (
        Errno::MFILE,
        Code::Capacity,
        "EMFILE",
        "too many open files",
    ),
    (
        Errno::NFILE,
        Code::Capacity,
        "ENFILE",
        "too many open files",
    ),
    (Errno::NOMEM, Code::Capacity, "ENOMEM", "no memory"),
    (
        Errno::IO,
        Code::Unavailable,
        "EIO",
        "its disk does not answer",
    ),
    (
        Errno::STALE,
        Code::Unavailable,
        "ESTALE",
        "on a file system that has gone",
    ),
    (
        Errno::AGAIN,
        Code::Unavailable,
        "EAGAIN",
        "changing all the time",
    ),
];

/// The error for whoever asked, about this path.
pub(super) fn refused(errno: Errno, path: &str) -> BoxError {
    let found = TABLE.iter().find(|(known, ..)| *known == errno);
    let Some((_, code, name, words)) = found else {
        return BoxError::internal(format!("{path}: error {}", errno.raw_os_error()));
    };
    let disk = *code == Code::Capacity;
    BoxError::new(*code, format!("{path}: {words}")).with_detail(&Detail {
        errno: Some((*name).to_owned()),
        subject: disk.then_some(Subject::Disk),
        ..Detail::default()
    })
}

/// The same for one of several paths.
pub(super) fn fault(error: &BoxError) -> FileFault {
    let detail = error.detail::<Detail>().unwrap_or_default();
    FileFault {
        code: error.code(),
        message: error.message().to_owned(),
        errno: detail.errno,
    }
}

/// Says which path an error is about.
pub(super) trait About<T> {
    fn about(self, path: &str) -> Result<T, BoxError>;
}

impl<T> About<T> for Result<T, Errno> {
    fn about(self, path: &str) -> Result<T, BoxError> {
        self.map_err(|errno| refused(errno, path))
    }
}

impl<T> About<T> for std::io::Result<T> {
    fn about(self, path: &str) -> Result<T, BoxError> {
        self.map_err(|error| match Errno::from_io_error(&error) {
            Some(errno) => refused(errno, path),
            None => BoxError::validation(format!("{path}: {error}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_a_word_and_a_name() {
        let error = refused(Errno::NOTEMPTY, "/a");
        assert_eq!(
            (error.code(), error.message()),
            (Code::Conflict, "/a: not empty")
        );
        assert_eq!(fault(&error).errno.as_deref(), Some("ENOTEMPTY"));
        assert_eq!(refused(Errno::BADF, "/a").code(), Code::Internal);
        let passing = refused(Errno::IO, "/a");
        assert_eq!(passing.code(), Code::Unavailable, "it may work later");
        assert_eq!(fault(&passing).errno.as_deref(), Some("EIO"));
        let detail: Detail = refused(Errno::NOSPC, "/a").detail().unwrap();
        assert_eq!(detail.subject, Some(Subject::Disk));
    }
}

//! Translation of system errors.

use box_protocol::actions::FileError;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use rustix::io::Errno;

/// The known system errors with their code, name and description.
const ERRORS: [(Errno, Code, &str, &str); 26] = [
    (Errno::NOENT, Code::NotFound, "ENOENT", "not found"),
    (Errno::ACCESS, Code::Denied, "EACCES", "permission denied"),
    (Errno::PERM, Code::Denied, "EPERM", "permission denied"),
    (Errno::ROFS, Code::Denied, "EROFS", "read-only file system"),
    (Errno::ISDIR, Code::Validation, "EISDIR", "is a directory"),
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
        "too many symbolic links, or one that must not be followed",
    ),
    (
        Errno::NAMETOOLONG,
        Code::Validation,
        "ENAMETOOLONG",
        "name too long",
    ),
    (Errno::INVAL, Code::Validation, "EINVAL", "invalid argument"),
    (Errno::NXIO, Code::Validation, "ENXIO", "not a regular file"),
    (
        Errno::NODEV,
        Code::Validation,
        "ENODEV",
        "not a regular file",
    ),
    (
        Errno::SPIPE,
        Code::Validation,
        "ESPIPE",
        "not a regular file",
    ),
    (
        Errno::XDEV,
        Code::Validation,
        "EXDEV",
        "outside the directory tree",
    ),
    (Errno::EXIST, Code::Conflict, "EEXIST", "already exists"),
    (
        Errno::NOTEMPTY,
        Code::Conflict,
        "ENOTEMPTY",
        "directory not empty",
    ),
    (Errno::BUSY, Code::Conflict, "EBUSY", "in use"),
    (
        Errno::TXTBSY,
        Code::Conflict,
        "ETXTBSY",
        "program is running",
    ),
    (Errno::NOSPC, Code::Capacity, "ENOSPC", "no space left"),
    (Errno::DQUOT, Code::Capacity, "EDQUOT", "no space left"),
    (Errno::FBIG, Code::Capacity, "EFBIG", "file too large"),
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
    (Errno::NOMEM, Code::Capacity, "ENOMEM", "out of memory"),
    (
        Errno::IO,
        Code::Unavailable,
        "EIO",
        "disk error; retry later",
    ),
    (
        Errno::STALE,
        Code::Unavailable,
        "ESTALE",
        "its file system is gone",
    ),
    (
        Errno::AGAIN,
        Code::Unavailable,
        "EAGAIN",
        "changes during every lookup; retry later",
    ),
];

/// The error of a system call on this path.
pub(super) fn path_error(errno: Errno, path: &str) -> BoxError {
    let found = ERRORS.iter().find(|(known, ..)| *known == errno);
    let Some((_, code, name, description)) = found else {
        return BoxError::internal(format!(
            "{path}: the kernel returned errno {}",
            errno.raw_os_error()
        ));
    };
    let subject = if *code == Code::Capacity {
        Subject::Disk
    } else {
        Subject::File
    };
    BoxError::new(*code, format!("{path}: {description}")).with_detail(&Detail {
        errno: Some((*name).to_owned()),
        subject: Some(subject),
        ..Detail::default()
    })
}

/// The form of an error for one of several paths.
pub(super) fn fault(error: &BoxError) -> FileError {
    let detail = error.detail::<Detail>().unwrap_or_default();
    FileError {
        code: error.code(),
        message: error.message().to_owned(),
        errno: detail.errno,
    }
}

/// Adds the path to an error.
pub(super) trait PathContext<T> {
    fn with_path(self, path: &str) -> Result<T, BoxError>;
}

impl<T> PathContext<T> for Result<T, Errno> {
    fn with_path(self, path: &str) -> Result<T, BoxError> {
        self.map_err(|errno| path_error(errno, path))
    }
}

impl<T> PathContext<T> for std::io::Result<T> {
    fn with_path(self, path: &str) -> Result<T, BoxError> {
        self.map_err(|error| match Errno::from_io_error(&error) {
            Some(errno) => path_error(errno, path),
            None => BoxError::validation(format!("{path}: {error}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_a_code_and_an_errno_name() {
        let error = path_error(Errno::NOTEMPTY, "/a");
        assert_eq!(
            (error.code(), error.message()),
            (Code::Conflict, "/a: directory not empty")
        );
        assert_eq!(fault(&error).errno.as_deref(), Some("ENOTEMPTY"));
        assert_eq!(path_error(Errno::BADF, "/a").code(), Code::Internal);
        let transient = path_error(Errno::IO, "/a");
        assert_eq!(
            transient.code(),
            Code::Unavailable,
            "a later attempt may succeed"
        );
        assert_eq!(fault(&transient).errno.as_deref(), Some("EIO"));
        let detail: Detail = path_error(Errno::NOSPC, "/a").detail().unwrap();
        assert_eq!(detail.subject, Some(Subject::Disk));
        let detail: Detail = error.detail().unwrap();
        assert_eq!(detail.subject, Some(Subject::File));
    }
}

//! Archives of files that the user of the server owns and may not read.
//!
//! An image or a guest can withdraw the owner's rights to a file (mode 000). Root reads it anyway.
//! For an ordinary user, a child of this program reads it in a user namespace of its own, where it
//! has the rights over all files of its user. The files keep their modes, also if the server ends.

use std::ffi::OsStr;
use std::io::{self, BufWriter, Read, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, OnceLock};

use box_image::{Archiver, Error, Tree};

/// Argument that turns a program into an archiver.
const ARGUMENT: &str = "--box-archive";

/// Longest message of an archiver that has failed.
const MESSAGE_BYTES: u64 = 1024;

/// Bytes that an archiver writes at once.
const BUFFER: usize = 64 * 1024;

/// This program, if its `main` has called [`archive_if_asked`].
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Runs as an archiver if this process was started as one, and never returns then.
///
/// The program calls it early in `main`, before it has threads. In a program that does not, an
/// ordinary user cannot export files of mode 000.
pub fn archive_if_asked() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|first| first != ARGUMENT) {
        if let Ok(program) = std::env::current_exe() {
            let _ = PROGRAM.set(program);
        }
        return;
    }
    let Err(error) = archive(arguments.next().as_deref()) else {
        std::process::exit(0)
    };
    let _ = writeln!(io::stderr(), "{error}");
    std::process::exit(1);
}

fn archive(tree: Option<&OsStr>) -> Result<(), Error> {
    let trees = [Tree::Image, Tree::Changes];
    let tree = trees.into_iter().find(|known| tree == Some(word(*known)));
    let tree = tree.ok_or_else(|| Error::Storage("export: unknown kind of tree".to_owned()))?;
    let mut root = Vec::new();
    io::stdin()
        .read_to_end(&mut root)
        .map_err(|error| failed(&error))?;
    let root = PathBuf::from(std::ffi::OsString::from_vec(root));
    // Without the namespace, the archiver still reads what its user may read.
    let _ = box_sys::own_all_files();
    let writer = BufWriter::with_capacity(BUFFER, io::stdout().lock());
    box_image::write_archive(&root, tree, writer)
}

fn word(tree: Tree) -> &'static OsStr {
    OsStr::new(match tree {
        Tree::Image => "image",
        Tree::Changes => "changes",
    })
}

fn failed(error: &io::Error) -> Error {
    Error::Storage(format!("export: the archiver failed: {}", error.kind()))
}

/// Starts children that archive.
#[derive(Debug)]
struct Children(&'static Path);

/// Returns the archiver that this process needs, if any.
pub(super) fn archiver() -> Option<Arc<dyn Archiver>> {
    if rustix::process::geteuid().is_root() {
        return None;
    }
    let program = PROGRAM.get()?;
    Some(Arc::new(Children(program)))
}

impl Archiver for Children {
    fn open(&self, root: &Path, tree: Tree) -> Result<Box<dyn Read>, Error> {
        let start = || {
            let mut child = Command::new(self.0)
                .arg0("box")
                .arg(ARGUMENT)
                .arg(word(tree))
                .env_clear()
                .current_dir("/")
                // Ctrl-C ends this process, and so the child's reader.
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
            let archive = Archive { child, stdout };
            if let Some(mut stdin) = stdin {
                stdin.write_all(root.as_os_str().as_bytes())?;
            }
            Ok(archive)
        };
        let archive = start().map_err(|error: io::Error| failed(&error))?;
        Ok(Box::new(archive))
    }
}

/// The output of a child. Its end is an error if the child has failed.
struct Archive {
    child: Child,
    stdout: Option<ChildStdout>,
}

impl Read for Archive {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(stdout) = &mut self.stdout else {
            return Ok(0);
        };
        let length = stdout.read(into)?;
        if length > 0 || into.is_empty() {
            return Ok(length);
        }
        self.stdout = None;
        let mut message = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            let _ = stderr.take(MESSAGE_BYTES).read_to_string(&mut message);
        }
        if self.child.wait()?.success() {
            return Ok(0);
        }
        let message = match message.trim() {
            "" => "export: the archiver ended early",
            message => message,
        };
        Err(io::Error::other(Error::Storage(message.to_owned())))
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        // A child that has ended is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

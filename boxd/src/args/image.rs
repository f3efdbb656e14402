//! The command line of `boxd image`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use crate::{complete, values};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd image pull debian:12
  boxd run --image debian:12 'cat /etc/os-release'
  docker save app | boxd image import - app
  pass show ghcr.io | boxd image login ghcr.io -u ann --password-stdin
All callers of a server share its images. Without a server, boxd uses the images of this user.")]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    pub(crate) command: ImageCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Pull an image from its registry and print its digest
    Pull(PullArgs),
    /// List images
    #[command(visible_alias = "list")]
    Ls(ImageLsArgs),
    /// Show details of an image
    Inspect(ImageArg),
    /// Remove images that no box uses
    Rm(ImageRmArgs),
    /// Remove images without a name that no box uses, and unfinished downloads
    Prune(PruneArgs),
    /// Import an image from a file, a directory or stdin and print its digest
    #[command(visible_alias = "load")]
    Import(ImportArgs),
    /// Export an image as an archive of an OCI layout
    #[command(visible_alias = "save")]
    Export(ExportArgs),
    /// Store the password of a registry
    Login(LoginArgs),
    /// Remove the stored password of a registry
    Logout(LogoutArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// Image to pull
    #[arg(add = complete::images(), value_name = "NAME[:TAG][@DIGEST]")]
    pub(crate) name: String,
    /// Print no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImageLsArgs {
    /// Print only digests, one per line
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImageArg {
    /// Image: its name, its digest, or the first digits of its digest
    #[arg(add = complete::images(), value_name = "IMAGE")]
    pub(crate) image: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Removing the last name of an image removes the image. A digest removes the image with all its names.")]
pub(crate) struct ImageRmArgs {
    /// Names or digests of the images
    #[arg(add = complete::images(), value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct PruneArgs {
    /// Remove images with names too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Keep images used or created within this time (90, 30m, 2d)
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub(crate) unused_for: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd image import app.tar app:1             an OCI layout, docker save, or a root file system
  boxd image import layout/ app:1             a directory with an OCI layout
  docker save app:1 | boxd image import - app:1
Names in the file are ignored: the image gets only the given name.")]
pub(crate) struct ImportArgs {
    /// File, directory, or - for stdin
    #[arg(value_name = "FILE", value_hint = ValueHint::AnyPath)]
    pub(crate) file: PathBuf,
    /// Name of the image
    #[arg(value_name = "NAME[:TAG]")]
    pub(crate) name: String,
    /// Take this image if the file has several: its name in the file, or its digest
    #[arg(long, value_name = "IMAGE")]
    pub(crate) select: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Image: its name, its digest, or the first digits of its digest
    #[arg(add = complete::images(), value_name = "IMAGE")]
    pub(crate) image: String,
    /// File, or - for stdout
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "\
boxd checks the password with the registry before it stores it. boxd also uses the passwords in Docker's config.json.")]
pub(crate) struct LoginArgs {
    /// Registry to log in to
    #[arg(value_name = "HOST[:PORT]", value_hint = ValueHint::Hostname)]
    pub(crate) registry: String,
    /// User name [default: ask for it]
    #[arg(short, long, value_name = "USER")]
    pub(crate) username: Option<String>,
    /// Read the password from stdin
    #[arg(long)]
    pub(crate) password_stdin: bool,
    /// Use --password-stdin instead
    #[arg(short, long, hide = true, value_name = "PASSWORD")]
    pub(crate) password: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LogoutArgs {
    /// Registry to log out of
    #[arg(value_name = "HOST[:PORT]", value_hint = ValueHint::Hostname)]
    pub(crate) registry: String,
}

//! Conversion of a spec to the kernel objects of a box.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxMountSpec, BoxSpec, HostPathMode, Invalid, Name, Network};
use box_sys::{Guest, Layer, Limits, Mount, Root, SandboxPlan, Scratch, Source};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::artifacts::ArtifactCopies;
use super::{NativeConfig, image_user};
use crate::backend::{ImageRoot, LayerKind, StartRequest};

/// User and group id of the guest inside every box.
pub(super) const GUEST: u32 = 1000;

/// Longest host name in bytes.
const HOSTNAME_BYTES: usize = 63;

/// Host path mounted into a box.
#[derive(Debug)]
pub(super) struct HostMount {
    pub(super) path: String,
    pub(super) source: OwnedFd,
    pub(super) writable: bool,
}

impl AsRef<Path> for HostMount {
    fn as_ref(&self) -> &Path {
        Path::new(&self.path)
    }
}

/// Plan of a box, with the objects that it refers to.
#[derive(Debug)]
pub(super) struct BoxPlan {
    pub(super) sandbox: SandboxPlan,
    /// Mounted host paths.
    pub(super) host_mounts: Vec<HostMount>,
    /// Source of the system directories.
    pub(super) rootfs: &'static str,
    /// User of the image, if the box runs as that.
    pub(super) image_user: Option<box_protocol::Guest>,
}

/// Returns the plan of a box.
///
/// Mounts with a digest use their copies.
pub(super) fn build(
    request: &StartRequest<'_>,
    config: &NativeConfig,
    copies: &mut ArtifactCopies,
    scratch: Scratch,
) -> Result<BoxPlan, BoxError> {
    let spec = request.spec;
    let image = image(request, config)?;
    let (guest, image_user) = guest(request, image)?;
    let (mut mounts, mut host_mounts) = (Vec::new(), Vec::new());
    if let Some(host_path) = spec
        .host_path
        .as_deref()
        .filter(|_| spec.mounts_host_path())
    {
        let overlay = spec.host_path_mode == HostPathMode::Overlay;
        let writable = spec.host_path_mode == HostPathMode::Rw;
        host_mounts.push(HostMount {
            path: host_path.to_owned(),
            source: open("host_path", host_path)?,
            writable,
        });
        mounts.push(Mount {
            source: Source::Fd(0),
            target: PathBuf::from(&spec.mount_path),
            writable: writable || overlay,
            overlay,
        });
    }
    for extra in &spec.extra_mounts {
        if let Some((mount, source)) = mount(extra, host_mounts.len(), copies)? {
            host_mounts.push(HostMount {
                path: extra.host_path.clone(),
                source,
                writable: mount.writable,
            });
            mounts.push(mount);
        }
    }
    let memory = spec.memory_mb.saturating_mul(1 << 20);
    let plan = SandboxPlan {
        name: "box".into(),
        hostname: hostname(spec.name.as_ref().map(Name::as_str)),
        root: image.map_or(Root::Host, |image| Root::Image(image.path.clone())),
        layers: layers(request.layers),
        read_only_root: spec.read_only_rootfs,
        guest,
        dirs: dirs(spec),
        mounts,
        limits: Limits {
            cpus: Some(spec.cpus),
            memory: Some(memory),
            // The agent does not count against the guest's limit.
            pids: Some(spec.pids_limit.saturating_add(1)),
        },
        scratch,
        network: match spec.network {
            Network::Off => box_sys::Network::Loopback,
            Network::On => box_sys::Network::Egress,
        },
        owned: !config.outlive,
        ..SandboxPlan::default()
    };
    plan.validate()
        .map_err(|error| super::sandbox_error(&error))?;
    Ok(BoxPlan {
        sandbox: plan,
        host_mounts,
        rootfs: if image.is_some() { "image" } else { "host" },
        image_user,
    })
}

/// Converts the layers of a box.
pub(super) fn layers(layers: &[crate::backend::Layer]) -> Vec<Layer> {
    let layer = |layer: &crate::backend::Layer| Layer {
        path: layer.path.clone(),
        kind: match layer.kind {
            LayerKind::Directory => box_sys::LayerKind::Directory,
            LayerKind::Disk => box_sys::LayerKind::Disk,
        },
    };
    layers.iter().map(layer).collect()
}

/// Returns the guest of a box, and the user of its image if the box runs as that.
fn guest(
    request: &StartRequest<'_>,
    image: Option<&ImageRoot>,
) -> Result<(Guest, Option<box_protocol::Guest>), BoxError> {
    let spec = request.spec;
    let (name, home) = request.guest();
    let plain = Guest {
        name: name.to_owned(),
        home: home.into(),
        id: GUEST,
        group: GUEST,
    };
    let (image, asked) = match (image, &spec.user) {
        (None, None) => return Ok((plain, None)),
        (None, Some(_)) => {
            return Err(Invalid::new("user", "requires an image; omit it").into());
        }
        (Some(image), asked) => (image, asked.as_deref()),
    };
    // A caller that names the guest describes another user than the image's.
    let own = image.user.as_deref().filter(|_| spec.guest.is_none());
    let Some(user) = asked.or(own) else {
        return Ok((plain, None));
    };
    let guest = image_user::resolve(&image.path, user)?;
    let shown = box_protocol::Guest {
        name: guest.name.clone(),
        home: guest.home.to_string_lossy().into_owned(),
    };
    Ok((guest, Some(shown)))
}

/// Adds the mounts of volumes to a plan.
pub(super) fn add_volumes(plan: &mut SandboxPlan, volumes: Vec<Mount>) -> Result<(), BoxError> {
    for volume in &volumes {
        if plan
            .mounts
            .iter()
            .any(|mount| mount.target == volume.target)
        {
            let path = volume.target.display();
            let rule = format!("another mount has the path {path}; use different paths");
            return Err(Invalid::new("volumes", rule).into());
        }
    }
    plan.mounts.extend(volumes);
    plan.validate()
        .map_err(|error| super::sandbox_error(&error))
}

/// Returns the host name of a box: its name in valid characters, or the default.
fn hostname(name: Option<&str>) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = name.unwrap_or_default().chars().map(plain).collect();
    let name = name.trim_matches('-');
    let name = name.get(..HOSTNAME_BYTES).unwrap_or(name);
    match name.trim_end_matches('-') {
        "" => "box".to_owned(),
        name => name.to_owned(),
    }
}

/// Returns the image of a box, or `None` for the system directories of the machine.
fn image<'a>(
    request: &StartRequest<'a>,
    config: &'a NativeConfig,
) -> Result<Option<&'a ImageRoot>, BoxError> {
    if request.image.is_some() {
        return Ok(request.image);
    }
    let spec = request.spec;
    let image = spec
        .image
        .as_ref()
        .and_then(|image| config.images.get(image));
    match image {
        Some(image) => Ok(Some(image)),
        None if config.strict_images => {
            let problem = match spec.image {
                Some(_) => "image: not one of the configured images",
                None => "image: must be set, because images.strict is set",
            };
            Err(BoxError::unsupported(problem).with_detail(&Detail::of_field("image")))
        }
        None => Ok(None),
    }
}

/// Plans an additional mount from the `n`th descriptor, unless its mode is `none`.
pub(super) fn mount(
    spec: &BoxMountSpec,
    n: usize,
    copies: &mut ArtifactCopies,
) -> Result<Option<(Mount, OwnedFd)>, BoxError> {
    if spec.mode == HostPathMode::None {
        return Ok(None);
    }
    let mount = Mount {
        source: Source::Fd(n),
        target: PathBuf::from(&spec.mount_path),
        writable: spec.mode == HostPathMode::Rw,
        overlay: false,
    };
    let source = match copies.remove(&spec.mount_path) {
        Some(copy) => copy,
        None => open("extra_mounts", &spec.host_path)?,
    };
    Ok(Some((mount, source)))
}

/// Returns the directories to create for the guest: workspace and requested ones.
fn dirs(spec: &BoxSpec) -> Vec<PathBuf> {
    let requested = spec.dirs.iter().flatten().map(String::as_str);
    let always = [box_protocol::DEFAULT_MOUNT_PATH, &spec.mount_path];
    let all = always.into_iter().chain(requested);
    let mut dirs: Vec<PathBuf> = all.map(PathBuf::from).collect();
    dirs.sort();
    dirs.dedup();
    dirs.retain(|dir| !["/tmp", "/var/tmp"].iter().any(|tmp| dir == Path::new(tmp)));
    dirs
}

/// Opens a directory of the host.
///
/// The policy check has already resolved its symlinks, so a symlink found now was placed there
/// afterwards.
pub(super) fn open(field: &'static str, path: &str) -> Result<OwnedFd, BoxError> {
    let opened = rustix::fs::openat2(
        CWD,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    );
    opened.map_err(|error| {
        let why = match error {
            Errno::NOENT | Errno::NOTDIR => "does not exist",
            Errno::LOOP => "contains a symbolic link",
            Errno::ACCESS => "not readable by the server",
            _ => "cannot be opened",
        };
        BoxError::from(Invalid::new(field, why))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_name_is_the_name_of_the_box_in_valid_characters() {
        for (name, host) in [
            ("work", "work"),
            ("My_Box.2", "My-Box-2"),
            ("-odd- ", "odd"),
            ("größe", "gr--e"),
            ("箱", "box"),
            ("...", "box"),
        ] {
            assert_eq!(hostname(Some(name)), host, "{name}");
        }
        assert_eq!(hostname(None), "box");
        let long = format!("{}-{}", "a".repeat(62), "b".repeat(200));
        assert_eq!(hostname(Some(&long)), "a".repeat(62));
    }
}

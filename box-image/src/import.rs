//! Imports images from files: OCI layouts, archives of `docker save`, and root file systems.
//!
//! An archive may name its images as it likes. Only the name that the caller states is set (CVE-2026-50195).

use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::path::Path;

use serde::Deserialize;

use crate::build::{self, Documents, Expected};
use crate::decode::{LayerLimits, decode};
use crate::digest::Digest;
use crate::error::{At as _, Error, Result, shown};
use crate::limits::{CONFIG_BYTES, LAYERS, MANIFEST_BYTES};
use crate::platform::Platform;
use crate::progress::{Event, Progress};
use crate::reference::Reference;
use crate::spec::{
    self, ConfigFile, Descriptor, Document, Index, Manifest, OCI_CONFIG, OCI_LAYER, OCI_MANIFEST,
};
use crate::store::{Image, Name, Store, Work};

mod files;

use files::Files;

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// Format of a file to import.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImportFormat {
    /// Found from the content.
    #[default]
    Auto,
    /// OCI layout: a directory or an archive.
    OciLayout,
    /// Archive of `docker save`.
    DockerArchive,
    /// Archive of a root file system.
    RootFileSystem,
}

/// Options of an import.
#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// Name of the image in the store; without it, the image has only its digest.
    pub name: Option<Reference>,
    /// Which image to take if the file contains several: its name in the file or its digest.
    pub select: Option<String>,
    /// Format of the file.
    pub format: ImportFormat,
    /// Receiver of progress.
    pub progress: Progress,
}

impl Store {
    /// Imports an image from a directory or a file.
    pub fn import(&self, path: &Path, options: &ImportOptions) -> Result<Image> {
        options.check()?;
        let found = File::open(path).at("import")?;
        let kind = found.metadata().at("import")?;
        let work = self.work()?;
        if kind.is_dir() {
            if !matches!(options.format, ImportFormat::Auto | ImportFormat::OciLayout) {
                return Err(Error::invalid(
                    "import: a directory must be an OCI layout; use an archive",
                ));
            }
            return self.import_files(work, &Files::directory(found)?, options);
        }
        if !kind.is_file() {
            return self.spool(work, found, options);
        }
        let mut magic = [0; 4];
        let mut file = found;
        let read = read_up_to(&mut file, &mut magic).at("import")?;
        file.seek(SeekFrom::Start(0)).at("import")?;
        let compressed = matches!(&magic[..read], [0x1f, 0x8b, ..] | [0x28, 0xb5, 0x2f, 0xfd]);
        if compressed {
            return self.spool(work, file, options);
        }
        self.import_archive(work, file, options)
    }

    /// Imports an image from a stream.
    pub fn import_stream(
        &self,
        stream: impl Read + Send,
        options: &ImportOptions,
    ) -> Result<Image> {
        options.check()?;
        self.spool(self.work()?, stream, options)
    }

    /// Decompresses a stream into a file, because the parts of an archive come in any order.
    fn spool(
        &self,
        work: Work,
        stream: impl Read + Send,
        options: &ImportOptions,
    ) -> Result<Image> {
        let limits = self.limits();
        let limits = LayerLimits {
            compressed_bytes: limits.decoded_bytes,
            decoded_bytes: limits.decoded_bytes,
            ratio: limits.ratio,
        };
        let path = work.path().join("import");
        let mut options_of_file = File::options();
        options_of_file.read(true).write(true).create_new(true);
        let mut file = options_of_file.open(&path).at("image store")?;
        decode(stream, limits, |pieces| {
            io::copy(pieces, &mut file).map_err(|error| Error::io("import", &error))
        })?;
        // The open file is enough, and must not become part of the image.
        std::fs::remove_file(&path).at("image store")?;
        file.seek(SeekFrom::Start(0)).at("image store")?;
        self.import_archive(work, file, options)
    }

    fn import_archive(&self, work: Work, file: File, options: &ImportOptions) -> Result<Image> {
        if options.format == ImportFormat::RootFileSystem {
            return self.import_root(work, file, options);
        }
        let copy = file.try_clone().at("import")?;
        let files = Files::archive(copy, self.limits().entries)?;
        let oci = files.contains("oci-layout") && files.contains("index.json");
        match options.format {
            ImportFormat::OciLayout => self.import_files(work, &files, options),
            ImportFormat::Auto if oci => self.import_files(work, &files, options),
            ImportFormat::DockerArchive => self.import_docker(work, &files, options),
            ImportFormat::Auto if is_docker(&files) => self.import_docker(work, &files, options),
            _ => self.import_root(work, file, options),
        }
    }

    /// Imports an OCI layout.
    fn import_files(&self, work: Work, files: &Files, options: &ImportOptions) -> Result<Image> {
        if !files.contains("oci-layout") {
            return Err(Error::invalid(
                "import: it is not an OCI layout; use one, or an archive",
            ));
        }
        let index: Index = spec::json(&files.read("index.json", MANIFEST_BYTES)?, "index.json")?;
        let host = Platform::host();
        let mut descriptor = options.choose(&index, &host)?.clone();
        let mut nested = 0;
        let (bytes, manifest) = loop {
            let bytes = files.blob(&descriptor, MANIFEST_BYTES)?;
            match Document::parse(&bytes, Some(&descriptor.media_type))? {
                Document::Manifest(manifest) => break (bytes, manifest),
                Document::Index(index) => {
                    nested += 1;
                    if nested > 2 {
                        return Err(Error::invalid(
                            "import: an index contains an index in an index; use a plain one",
                        ));
                    }
                    descriptor = index.choose(&host)?.clone();
                }
            }
        };
        let config = files.blob(&manifest.config, CONFIG_BYTES)?;
        let parsed = ConfigFile::parse(&config, &manifest, &host)?;
        let expected = expected(&manifest, &parsed);
        options.resolved(&bytes, &manifest);
        let layers = build::unpack(
            &work,
            self.limits(),
            &expected,
            &options.progress,
            |number| files.open_blob(&manifest.layers[number].digest),
        )?;
        let documents = Documents {
            manifest: bytes,
            config,
            parsed,
        };
        self.save_import(work, &layers, documents, options)
    }

    /// Imports an archive of `docker save`, which states only the digests of uncompressed layers.
    fn import_docker(&self, work: Work, files: &Files, options: &ImportOptions) -> Result<Image> {
        let images: Vec<DockerImage> = spec::json(
            &files.read("manifest.json", MANIFEST_BYTES)?,
            "manifest.json",
        )?;
        let image = options.choose_docker(&images)?;
        if image.layers.len() > LAYERS {
            return Err(Error::too_large("manifest.json", "layers", LAYERS as u64));
        }
        let config = files.read(&image.config, CONFIG_BYTES)?;
        // Stands for the layers until their digests are known.
        let unknown = Descriptor::new(OCI_LAYER, Digest::of(b""), 0);
        let mut manifest = manifest(&config, vec![unknown; image.layers.len()]);
        let parsed = ConfigFile::parse(&config, &manifest, &Platform::host())?;
        let diff_ids = parsed.diff_ids().iter();
        let expected: Vec<_> = diff_ids
            .map(|diff_id| Expected {
                content: None,
                diff_id: Some(*diff_id),
            })
            .collect();
        let layers = build::unpack(
            &work,
            self.limits(),
            &expected,
            &options.progress,
            |number| files.open(&image.layers[number]),
        )?;
        manifest.layers = described(&layers);
        let documents = Documents {
            manifest: spec::to_json(&manifest, "manifest")?,
            config,
            parsed,
        };
        self.save_import(work, &layers, documents, options)
    }

    /// Imports a root file system as an image of one layer.
    fn import_root(&self, work: Work, mut file: File, options: &ImportOptions) -> Result<Image> {
        file.seek(SeekFrom::Start(0)).at("import")?;
        let expected = [Expected {
            content: None,
            diff_id: None,
        }];
        let mut file = Some(file);
        let layers = build::unpack(&work, self.limits(), &expected, &options.progress, |_| {
            file.take().ok_or_else(Error::lost)
        })?;
        if layers.is_empty() {
            return Err(Error::invalid(
                "import: the archive is empty; use an image or a root file system",
            ));
        }
        let host = Platform::host();
        let diff_ids: Vec<_> = layers.decoded.iter().map(|layer| layer.diff_id).collect();
        let config = serde_json::json!({
            "architecture": host.architecture,
            "os": host.os,
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = spec::to_json(&config, "configuration")?;
        let manifest = manifest(&config, described(&layers));
        let documents = Documents {
            manifest: spec::to_json(&manifest, "manifest")?,
            parsed: ConfigFile::parse(&config, &manifest, &host)?,
            config,
        };
        self.save_import(work, &layers, documents, options)
    }

    fn save_import(
        &self,
        work: Work,
        layers: &build::Layers,
        documents: Documents,
        options: &ImportOptions,
    ) -> Result<Image> {
        let digest = Digest::of(&documents.manifest);
        let name = options.name.as_ref().map(|reference| Name {
            reference: reference.clone(),
            digest,
            resolved: digest,
        });
        build::save(
            work,
            layers,
            documents,
            None,
            name.as_ref(),
            &options.progress,
        )?;
        self.get(&digest.to_string())
    }
}

impl ImportOptions {
    fn check(&self) -> Result<()> {
        match &self.name {
            Some(name) if name.digest().is_some() => Err(Error::invalid(format!(
                "import: the name `{name}` contains a digest; use NAME:TAG"
            ))),
            _ => Ok(()),
        }
    }

    fn resolved(&self, bytes: &[u8], manifest: &Manifest) {
        let digest = Digest::of(bytes);
        let layers = manifest
            .layers
            .iter()
            .map(|layer| (layer.digest, layer.size))
            .collect();
        self.progress.report(Event::Resolved { digest, layers });
    }

    /// Chooses an image of a layout.
    fn choose<'a>(&self, index: &'a Index, host: &Platform) -> Result<&'a Descriptor> {
        let names = |descriptor: &'a Descriptor| {
            [REF_NAME, CONTAINERD_NAME]
                .iter()
                .filter_map(|key| descriptor.annotations.get(*key).map(String::as_str))
        };
        let Some(select) = &self.select else {
            let platforms = index.manifests.iter().filter_map(|m| m.platform.as_ref());
            let mut platforms: Vec<_> = platforms.map(ToString::to_string).collect();
            platforms.sort();
            platforms.dedup();
            return match index.manifests.as_slice() {
                [one] => Ok(one),
                all if !all.is_empty() && platforms.len() == all.len() => index.choose(host),
                all => Err(several(all.len(), all.iter().flat_map(names))),
            };
        };
        let chosen = index.manifests.iter().find(|descriptor| {
            names(descriptor).any(|name| name == select) || descriptor.digest.to_string() == *select
        });
        chosen.ok_or_else(|| not_there(select))
    }

    fn choose_docker<'a>(&self, images: &'a [DockerImage]) -> Result<&'a DockerImage> {
        let names = |image: &'a DockerImage| image.repo_tags.iter().flatten().map(String::as_str);
        let Some(select) = &self.select else {
            return match images {
                [one] => Ok(one),
                all => Err(several(all.len(), all.iter().flat_map(names))),
            };
        };
        let chosen = images
            .iter()
            .find(|image| names(image).any(|name| name == select));
        chosen.ok_or_else(|| not_there(select))
    }
}

fn several<'a>(count: usize, names: impl Iterator<Item = &'a str>) -> Error {
    let names: Vec<_> = names.take(10).map(shown).collect();
    Error::invalid(format!(
        "import: the file contains {count} images; select one of: {}",
        names.join(", ")
    ))
}

fn not_there(select: &str) -> Error {
    Error::not_found(format!(
        "import: the file contains no image `{}`; check its name",
        shown(select)
    ))
}

/// Entry of `manifest.json` in an archive of `docker save`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Returns whether an archive is one of `docker save`, and no root file system with a file of that name.
fn is_docker(files: &Files) -> bool {
    let manifest = files.read("manifest.json", MANIFEST_BYTES);
    let images = manifest.and_then(|bytes| spec::json::<Vec<DockerImage>>(&bytes, "manifest.json"));
    images.is_ok_and(|images| {
        !images.is_empty() && images.iter().all(|image| files.contains(&image.config))
    })
}

fn manifest(config: &[u8], layers: Vec<Descriptor>) -> Manifest {
    Manifest {
        schema_version: 2,
        media_type: Some(OCI_MANIFEST.to_owned()),
        config: Descriptor::new(OCI_CONFIG, Digest::of(config), config.len() as u64),
        layers,
    }
}

/// Describes layers after they were read.
fn described(layers: &build::Layers) -> Vec<Descriptor> {
    let decoded = layers.decoded.iter();
    decoded
        .map(|layer| Descriptor::new(OCI_LAYER, layer.digest, layer.compressed_bytes))
        .collect()
}

/// Returns what a manifest and a configuration state about each layer.
pub(crate) fn expected(manifest: &Manifest, config: &ConfigFile) -> Vec<Expected> {
    let layers = manifest.layers.iter().zip(config.diff_ids());
    layers
        .map(|(layer, diff_id)| Expected {
            content: Some((layer.digest, layer.size)),
            diff_id: Some(*diff_id),
        })
        .collect()
}

fn read_up_to(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read(&mut buffer[read..])? {
            0 => break,
            more => read += more,
        }
    }
    Ok(read)
}

/// Wraps a file for many small reads.
fn buffered(file: File) -> BufReader<File> {
    BufReader::with_capacity(256 << 10, file)
}

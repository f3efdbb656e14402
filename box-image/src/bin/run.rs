//! The smallest program that pulls, imports, lists, exports and removes images.
//!
//! `box-image-run STORE pull REFERENCE [CA-FILE]`, `import PATH NAME`, `export NAME PATH`, `remove NAME`, `list`.
//! It prints digests and names; `pull` and `import` print the seconds that they took.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use box_image::{
    Error, ExportOptions, ImportOptions, Limits, PullOptions, Reference, Registry, RegistryOptions,
    Result, Store, Uses,
};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", error.code());
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    let [store, command @ ..] = arguments else {
        return Err(usage());
    };
    let store = Store::open(Path::new(store), Limits::default())?;
    let start = Instant::now();
    match command {
        ["pull", reference, ca_files @ ..] => {
            let mut options = RegistryOptions::default();
            options.ca_files = ca_files.iter().map(Into::into).collect();
            let registry = Registry::new(options)?;
            let reference: Reference = reference.parse()?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let runtime =
                runtime.map_err(|_| Error::Storage("runtime: it cannot start".to_owned()))?;
            let options = PullOptions::default();
            let image =
                runtime.block_on(box_image::pull(&store, &registry, &reference, &options))?;
            println!("{} {:.3}", image.digest, start.elapsed().as_secs_f64());
        }
        ["import", path, name] => {
            let options = ImportOptions {
                name: Some(name.parse()?),
                ..ImportOptions::default()
            };
            let image = match *path {
                "-" => store.import_stream(std::io::stdin(), &options)?,
                path => store.import(Path::new(path), &options)?,
            };
            println!("{} {:.3}", image.digest, start.elapsed().as_secs_f64());
        }
        ["export", name, path] => {
            let file = std::fs::File::create(path)
                .map_err(|_| Error::Storage("export: no file".to_owned()))?;
            println!("{}", store.export(name, file, &ExportOptions::default())?);
        }
        ["remove", name] => {
            store.remove(name, &Uses::new())?;
        }
        ["list"] => {
            for image in store.list()? {
                println!("{} {}", image.digest, image.names.join(" "));
            }
        }
        _ => return Err(usage()),
    }
    Ok(())
}

fn usage() -> Error {
    Error::Invalid("arguments: unknown; use STORE pull|import|export|remove|list".to_owned())
}

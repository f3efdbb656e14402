//! Trees as archives, including hostile ones.

use box_protocol::actions::{FilePack, FileTreeResult, FileUnpack, FileUnpackParams};
use box_protocol::{BoxError, Code};
use box_runtime::Caller;
use box_tests::machine::on_each_machine;
use serde_json::json;
use tar::{Builder, EntryType, Header};

use super::BoxFiles;

/// An archive of entries: kind, name, target or text.
fn archive(entries: &[(EntryType, &str, &str)]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for (kind, name, text) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o6755);
        let data: &[u8] = if matches!(kind, EntryType::Symlink | EntryType::Link) {
            header.set_link_name_literal(text).unwrap();
            b""
        } else {
            text.as_bytes()
        };
        header.set_size(data.len() as u64);
        // By hand, because the library would refuse names that lead outside.
        let field = &mut header.as_old_mut().name;
        field[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        archive.append(&header, data).unwrap();
    }
    archive.into_inner().unwrap()
}

impl BoxFiles<'_> {
    async fn unpack(
        self,
        id: &str,
        path: &str,
        archive: &[u8],
    ) -> Result<FileTreeResult, BoxError> {
        self.unpack_with(id, path, archive, json!({})).await
    }

    async fn unpack_with(
        self,
        id: &str,
        path: &str,
        archive: &[u8],
        caps: serde_json::Value,
    ) -> Result<FileTreeResult, BoxError> {
        let mut result = FileTreeResult::default();
        let pieces = archive.chunks(100_000).count();
        for (number, piece) in archive.chunks(100_000).enumerate() {
            let upload =
                json!({"id": id, "offset": number * 100_000, "done": number + 1 == pieces});
            let asked = json!({"path": path, "data": "", "upload": upload, "caps": caps});
            let mut params: FileUnpackParams = self.params(asked);
            params.data = piece.to_vec().into();
            let runtime = &self.machine.runtime;
            result = runtime
                .forward::<FileUnpack>(&Caller::Local, &params)
                .await?;
        }
        Ok(result)
    }
}

#[tokio::test]
async fn a_tree_is_packed_and_unpacked() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "tree").await;
        let long = "n".repeat(120);
        inside
            .run(&format!(
                "cd /tmp && mkdir -p t/d/{long} t/empty && head -c 700001 /dev/urandom > t/d/data && \
                 echo deep > t/d/{long}/{long} && ln -s d/data t/link && ln -s /nowhere/{long} t/d/far && \
                 touch t/none && chmod 741 t/none && chmod 555 t/empty"
            ))
            .await;
        let (packed, bytes) = inside.stream::<FilePack>(json!({"path": "/tmp/t"})).await;
        let packed = packed.unwrap();
        assert_eq!((packed.entries, packed.bytes), (8, 700_006));
        assert_eq!(inside.unpack("a", "/workspace/copy", &bytes).await.unwrap(), packed);
        let same = "cd /tmp && diff -r --no-dereference t /workspace/copy && \
                    for d in t /workspace/copy; do (cd $d; find . -mindepth 1 ! -type l -printf '%p %m %U\\n' | sort > /tmp/modes.$$); \
                    md5sum < /tmp/modes.$$; done | uniq | wc -l; ls -A /workspace";
        assert_eq!(inside.run(same).await, "1\ncopy");
        // The system's own program reads it, too.
        inside.write("/tmp/cut", &bytes[..1 << 16]).await;
        let (one, file) = inside.stream::<FilePack>(json!({"path": "/tmp/t/none"})).await;
        assert_eq!(one.unwrap().entries, 1);
        inside.write("/tmp/one.tar", &file).await;
        assert_eq!(inside.run("tar -tf /tmp/one.tar").await, "none");
    })
    .await;
}

#[tokio::test]
async fn a_hostile_archive_leaves_nothing() {
    on_each_machine(async |machine| {
        let workspace = machine.directory();
        let inside =
            BoxFiles::with(machine, "hostile", json!({"host_path": workspace.path()})).await;
        let fine = (EntryType::Regular, "fine", "x");
        let long = "x".repeat(100_000);
        let cases = [
            vec![fine, (EntryType::Regular, "/absolute", "x")],
            vec![fine, (EntryType::Regular, "../out", "x")],
            vec![fine, (EntryType::Regular, "a/../../out", "x")],
            vec![fine, (EntryType::Char, "device", "")],
            vec![fine, (EntryType::Block, "device", "")],
            vec![fine, (EntryType::Fifo, "pipe", "")],
            vec![fine, (EntryType::GNUSparse, "sparse", "")],
            vec![fine, (EntryType::Link, "hard", "/etc/passwd")],
            vec![fine, (EntryType::Link, "hard", "../../etc/passwd")],
            vec![fine, (EntryType::GNULongName, "././@LongLink", &long)],
        ];
        for (number, entries) in cases.iter().enumerate() {
            let id = format!("bad-{number}");
            let refused = inside.unpack(&id, "/workspace/t", &archive(entries)).await;
            assert_eq!(
                refused.unwrap_err().code(),
                Code::Validation,
                "{:?}",
                entries[1]
            );
            assert_eq!(
                inside.run("ls -A /workspace/t; ls /workspace").await,
                "t",
                "{:?}",
                entries[1]
            );
        }
        let garbage = inside
            .unpack("garbage", "/workspace/t", &[b'x'; 2000])
            .await;
        assert_eq!(garbage.unwrap_err().code(), Code::Validation);
        let cut = &archive(&[fine, (EntryType::Regular, "cut", "0123456789")])[..1030];
        assert_eq!(
            inside
                .unpack("cut", "/workspace/t", cut)
                .await
                .unwrap_err()
                .code(),
            Code::Validation
        );
        let many: Vec<_> = (0..20).map(|_| fine).collect();
        let caps = json!({"entries": 10});
        let refused = inside
            .unpack_with("many", "/workspace/t", &archive(&many), caps)
            .await;
        assert_eq!(refused.unwrap_err().code(), Code::TooLarge);
        let caps = json!({"bytes": 3});
        let bytes = archive(&[(EntryType::Regular, "four", "1234")]);
        let refused = inside
            .unpack_with("bytes", "/workspace/t", &bytes, caps)
            .await;
        assert_eq!(refused.unwrap_err().code(), Code::TooLarge);
        assert_eq!(inside.run("ls -A /workspace/t").await, "");
    })
    .await;
}

#[tokio::test]
async fn links_in_an_archive_are_created_and_never_followed() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "links").await;
        inside
            .run("mkdir /workspace/keep; echo kept > /workspace/keep/f")
            .await;
        let through = archive(&[
            (EntryType::Symlink, "d", "/workspace/keep"),
            (EntryType::Regular, "d/f", "overwritten"),
        ]);
        let refused = inside.unpack("through", "/workspace/t", &through).await;
        assert_eq!(refused.unwrap_err().code(), Code::Validation);
        let over = archive(&[
            (EntryType::Symlink, "f", "/workspace/keep/f"),
            (EntryType::Regular, "f", "mine"),
            (EntryType::Link, "hard", "f"),
            (EntryType::Regular, "f", "another"),
        ]);
        inside.unpack("over", "/workspace/t", &over).await.unwrap();
        let seen = inside
            .run("cd t; cat f hard; echo; stat -c %a f hard; cat ../keep/f; ls -A")
            .await;
        assert_eq!(seen, "anothermine\n755\n755\nkept\nd\nf\nhard");
        // A directory in place of a link, and a link that existed before.
        let dir = archive(&[
            (EntryType::Directory, "d", ""),
            (EntryType::Regular, "d/f", "x"),
        ]);
        let refused = inside.unpack("dir", "/workspace/t", &dir).await;
        assert_eq!(refused.unwrap_err().code(), Code::Validation);
        assert_eq!(inside.run("cat /workspace/keep/f").await, "kept");
    })
    .await;
}

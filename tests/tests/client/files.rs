//! Files of real boxes.

use box_client::{Code, FilePart, MAX_READ_BYTES, PIECE_BYTES};
use futures::StreamExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::support::with_a_box;

#[tokio::test]
async fn files_are_read_written_and_searched() {
    with_a_box(async |_, work| {
        let files = work.files();
        let written = files
            .write("/workspace/a/b.txt", "one\ntwo\nthree\n")
            .await
            .unwrap();
        assert_eq!(
            (written.path.as_str(), written.size),
            ("/workspace/a/b.txt", 14)
        );
        files.append("/workspace/a/b.txt", "four\n").await.unwrap();
        assert_eq!(
            files.read_to_string("/workspace/a/b.txt").await.unwrap(),
            "one\ntwo\nthree\nfour\n"
        );
        assert_eq!(
            files.read_lines("/workspace/a/b.txt", 2, 3).await.unwrap(),
            "two\nthree\n"
        );
        let part = FilePart::Bytes {
            offset: 4,
            len: Some(3),
        };
        assert_eq!(
            &files.read_part("/workspace/a/b.txt", part).await.unwrap()[..],
            b"two"
        );
        let found = files.find("/workspace", "**/*.txt").await.unwrap();
        assert_eq!(found.entries.len(), 1);
        let lines = files.grep("/workspace", "^t").await.unwrap();
        assert_eq!(lines.matches, 2);
        assert_eq!(
            files.replace("/workspace/a/b.txt", "t", "T").await.unwrap(),
            2
        );
        files
            .copy("/workspace/a/b.txt", "/workspace/c.txt")
            .await
            .unwrap();
        files
            .rename("/workspace/c.txt", "/workspace/d/e.txt")
            .await
            .unwrap();
        let error = files
            .copy("/workspace/a/b.txt", "/workspace/d/e.txt")
            .await
            .unwrap_err();
        assert!(error.is_conflict(), "{error:?}");
        let stat = files
            .set_permissions("/workspace/d/e.txt", 0o600)
            .await
            .unwrap();
        assert_eq!(stat.mode & 0o777, 0o600);
        files.create_dir_all("/workspace/x/y/z").await.unwrap();
        files.remove("/workspace/x").await.unwrap();
        let error = files.stat("/workspace/x").await.unwrap_err();
        assert!(error.is_not_found());
        assert_eq!(error.detail().errno.as_deref(), Some("ENOENT"));
        files.write("/workspace/raw", vec![0xff]).await.unwrap();
        let error = files.read_to_string("/workspace/raw").await.unwrap_err();
        assert_eq!(error.code(), Code::Validation);
    })
    .await;
}

#[tokio::test]
async fn large_files_are_transferred_in_pieces() {
    with_a_box(async |_, work| {
        let files = work.files();
        let large: Vec<u8> = (0_u32..2_700_000)
            .map(|n| (n % 251).to_le_bytes()[0])
            .collect();
        assert!(large.len() > 2 * PIECE_BYTES && (large.len() as u64) < MAX_READ_BYTES);
        files.write("/workspace/one", large.clone()).await.unwrap();
        assert_eq!(files.read("/workspace/one").await.unwrap(), large);
        let mut writer = files.writer("/workspace/two");
        writer.write_all(&large).await.unwrap();
        assert!(
            files.stat("/workspace/two").await.is_err(),
            "it appears at the end"
        );
        let stat = writer.finish().await.unwrap();
        assert_eq!(stat.size, large.len() as u64);
        let mut read = Vec::new();
        let mut reader = files.reader("/workspace/two").await.unwrap();
        reader.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, large);
        // A dropped writer leaves nothing.
        let mut writer = files.writer("/workspace/three");
        writer.write_all(&large).await.unwrap();
        drop(writer);
        assert!(
            files
                .stat("/workspace/three")
                .await
                .unwrap_err()
                .is_not_found()
        );
        let mut none = files.reader("/workspace/three").await.unwrap();
        let error = none.read_to_end(&mut read).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    })
    .await;
}

#[tokio::test]
async fn trees_are_transferred_as_archives() {
    with_a_box(async |_, work| {
        let files = work.files();
        files.write("/workspace/tree/a/one", "1").await.unwrap();
        files
            .write("/workspace/tree/two", vec![7; 2_000_000])
            .await
            .unwrap();
        let mut archive = Vec::new();
        let mut packed = files.download_tree("/workspace/tree").await.unwrap();
        packed.read_to_end(&mut archive).await.unwrap();
        let unpacked = files
            .upload_tree("/workspace/other", &archive[..])
            .await
            .unwrap();
        assert!(unpacked.entries >= 3, "{unpacked:?}");
        let found = files.find("/workspace/other", "**/one").await.unwrap();
        assert_eq!(
            &files.read(found.entries[0].path.clone()).await.unwrap()[..],
            b"1"
        );
    })
    .await;
}

#[tokio::test]
async fn a_watch_is_a_command_that_reports_changes_until_it_is_killed() {
    with_a_box(async |_, work| {
        let files = work.files();
        let mut watch = files.watch("/workspace").await.unwrap();
        files.write("/workspace/new.txt", "x").await.unwrap();
        let mut collected = String::new();
        while !collected.contains("/workspace/new.txt") {
            collected.push_str(&watch.next().await.unwrap().unwrap().text());
        }
        watch.kill().await.unwrap();
        assert_ne!(watch.exit().await.unwrap().code, Some(0));
        assert!(files.watch("/nowhere").await.unwrap_err().is_not_found());
    })
    .await;
}

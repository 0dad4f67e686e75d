//! A folder of a store, and what is done in it.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path as Key;
use object_store::{
    ClientOptions, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    RetryConfig, UpdateVersion, WriteMultipart,
};

use super::{Address, Error};

/// Longest time of one request: a part of a file, or a shard.
const REQUEST: Duration = Duration::from_secs(300);
const CONNECT: Duration = Duration::from_secs(10);
/// Quick failures are tried again within a call; a store that is away longer is
/// its caller's to wait for.
const TRIES: usize = 3;
const TRYING: Duration = Duration::from_secs(15);
/// Files are sent in parts of so many bytes, so many at once.
const PART: usize = 16 << 20;
const PARTS_AT_ONCE: usize = 4;

/// A folder of a store.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<dyn ObjectStore>,
    address: Address,
}

/// What a store tells of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Its name in the folder; slashes part the names.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// What tells it from another object of its name.
    pub tag: Option<String>,
    /// When it was written, in milliseconds.
    pub modified: i64,
}

impl Store {
    /// Makes the client of a folder. `settings` are the names and values that the
    /// store's own tools read from the environment (`AWS_REGION`); others are
    /// passed over. Nobody is asked anything.
    pub fn open(address: Address, settings: &[(String, String)]) -> Result<Self, Error> {
        // A second installation is an error that says that there is one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let refuse = |error: object_store::Error| Error::Client {
            url: address.to_string(),
            problem: error.to_string(),
        };
        let url = format!("{}://{}", address.scheme(), address.bucket);
        let client = ClientOptions::new().with_timeout(REQUEST).with_connect_timeout(CONNECT);
        let retry =
            RetryConfig { max_retries: TRIES, retry_timeout: TRYING, ..RetryConfig::default() };
        macro_rules! built {
            ($builder:ty) => {{
                let builder =
                    <$builder>::new().with_client_options(client).with_retry(retry).with_url(url);
                let builder = settings.iter().fold(builder, |builder, (name, value)| {
                    match name.to_ascii_lowercase().parse() {
                        Ok(name) => builder.with_config(name, value),
                        Err(_) => builder,
                    }
                });
                Arc::new(builder.build().map_err(refuse)?)
            }};
        }
        let inner: Arc<dyn ObjectStore> = match address.scheme() {
            "s3" => built!(AmazonS3Builder),
            "gs" => built!(GoogleCloudStorageBuilder),
            _ => built!(MicrosoftAzureBuilder),
        };
        Ok(Self { inner, address })
    }

    /// Uses a client that is there.
    pub fn over(inner: Arc<dyn ObjectStore>, address: Address) -> Self {
        Self { inner, address }
    }

    /// Returns the folder's address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Returns the address of something in it.
    pub fn url(&self, name: &str) -> String {
        self.address.join(name).to_string()
    }

    /// Returns another folder of the same bucket.
    pub fn at(&self, address: Address) -> Self {
        Self { inner: self.inner.clone(), address }
    }

    /// Returns a folder in it.
    pub fn inside(&self, name: &str) -> Self {
        Self { inner: self.inner.clone(), address: self.address.join(name) }
    }

    fn key(&self, name: &str) -> Key {
        self.address.join(name).key
    }

    /// Lists the objects right in the folder, and the names of its folders.
    pub async fn list(&self) -> Result<(Vec<Object>, Vec<String>), Error> {
        let listed = self.inner.list_with_delimiter(Some(&self.address.key)).await;
        let listed = listed.map_err(|error| self.failed("", error))?;
        let name = |key: &Key| key.filename().unwrap_or_default().to_owned();
        let objects = listed.objects.iter().map(|meta| Object::of(name(&meta.location), meta));
        let folders = listed.common_prefixes.iter().map(name);
        Ok((objects.collect(), folders.collect()))
    }

    /// Lists every object below the folder.
    pub async fn list_all(&self) -> Result<Vec<Object>, Error> {
        let found = self.inner.list(Some(&self.address.key)).try_collect::<Vec<_>>().await;
        let found = found.map_err(|error| self.failed("", error))?;
        let inside = |meta: &ObjectMeta| {
            let parts = meta.location.prefix_match(&self.address.key)?;
            let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
            Some(Object::of(parts.join("/"), meta))
        };
        Ok(found.iter().filter_map(inside).collect())
    }

    /// Returns what is under a name, if anything is.
    pub async fn look(&self, name: &str) -> Result<Option<Object>, Error> {
        match self.inner.head(&self.key(name)).await {
            Ok(meta) => Ok(Some(Object::of(name.to_owned(), &meta))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(name, error)),
        }
    }

    /// Reads a part of an object.
    pub async fn part(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Error> {
        let options = GetOptions {
            if_match: object.tag.clone(),
            range: Some(range.into()),
            ..GetOptions::default()
        };
        let name = &object.name;
        let got = self.inner.get_opts(&self.key(name), options).await;
        let got = got.map_err(|error| self.failed(name, error))?;
        got.bytes().await.map_err(|error| self.failed(name, error))
    }

    /// Reads a small object whole, if it is there.
    pub async fn read(&self, name: &str) -> Result<Option<Bytes>, Error> {
        Ok(self.read_version(name).await?.map(|(bytes, _, _)| bytes))
    }

    /// Reads a small object whole, with what tells it from those that follow it, and
    /// when it was written, in milliseconds.
    pub(super) async fn read_version(
        &self,
        name: &str,
    ) -> Result<Option<(Bytes, UpdateVersion, i64)>, Error> {
        let got = match self.inner.get(&self.key(name)).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            got => got.map_err(|error| self.failed(name, error))?,
        };
        let ObjectMeta { e_tag, version, last_modified, .. } = got.meta.clone();
        let bytes = got.bytes().await.map_err(|error| self.failed(name, error))?;
        Ok(Some((bytes, UpdateVersion { e_tag, version }, last_modified.timestamp_millis())))
    }

    /// Copies an object to a file. Errors unless it is the one that was listed,
    /// to its last byte.
    pub async fn fetch(&self, object: &Object, path: &Path, file: &mut File) -> Result<(), Error> {
        let name = &object.name;
        let options = GetOptions { if_match: object.tag.clone(), ..GetOptions::default() };
        let got = self.inner.get_opts(&self.key(name), options).await;
        let got = got.map_err(|error| self.failed(name, error))?;
        let changed = |problem: String| Error::Changed { url: self.url(name), problem };
        if object.tag.is_some() && got.meta.e_tag != object.tag {
            return Err(changed("it was replaced meanwhile".to_owned()));
        }
        let mut stream = got.into_stream();
        let mut size = 0;
        while let Some(bytes) = stream.next().await {
            let bytes = bytes.map_err(|error| self.failed(name, error))?;
            size += bytes.len() as u64;
            file.write_all(&bytes)
                .map_err(|source| Error::File { path: path.to_owned(), source })?;
        }
        match size == object.size {
            true => Ok(()),
            false => Err(changed(format!("{size} bytes came, of {}", object.size))),
        }
    }

    /// Gives a file its name in the folder, if nothing has that name.
    pub async fn publish(&self, name: &str, file: &Path) -> Result<(), Error> {
        let bytes =
            std::fs::read(file).map_err(|source| Error::File { path: file.to_owned(), source })?;
        self.put_new(name, bytes.into()).await
    }

    /// Puts bytes under a name that nothing has. Where the very same bytes are, that is
    /// done: a write whose answer was lost is tried again, and finds itself.
    pub async fn put_new(&self, name: &str, bytes: Bytes) -> Result<(), Error> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let put = self.inner.put_opts(&self.key(name), bytes.clone().into(), options).await;
        match put {
            // What a condition of "nothing is there" comes to in some dialects.
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            ) => self.is_there(name, &bytes).await,
            put => put.map(drop).map_err(|error| self.failed(name, error)),
        }
    }

    /// Errors unless what has a name is the given bytes.
    async fn is_there(&self, name: &str, bytes: &Bytes) -> Result<(), Error> {
        let url = self.url(name);
        match self.look(name).await? {
            // S3 says so while another write of the name is under way.
            None => {
                let problem = "another write of this name is under way".to_owned();
                Err(Error::Away { url, problem })
            }
            Some(object) if object.size != bytes.len() as u64 => Err(Error::Exists { url }),
            Some(_) => match self.read(name).await? {
                Some(there) if there == *bytes => Ok(()),
                _ => Err(Error::Exists { url }),
            },
        }
    }

    /// Puts bytes over one version of an object. It has changed if that is there no
    /// more.
    pub(super) async fn update(
        &self,
        name: &str,
        bytes: Bytes,
        version: UpdateVersion,
    ) -> Result<(), Error> {
        let options = PutOptions { mode: PutMode::Update(version), ..PutOptions::default() };
        match self.inner.put_opts(&self.key(name), bytes.into(), options).await {
            // A conflict with another write of the same version.
            Err(object_store::Error::AlreadyExists { .. }) => {
                let problem = "it was replaced meanwhile".to_owned();
                Err(Error::Changed { url: self.url(name), problem })
            }
            put => put.map(drop).map_err(|error| self.failed(name, error)),
        }
    }

    /// Puts bytes under a name, whatever is there.
    pub async fn replace(&self, name: &str, bytes: Bytes) -> Result<(), Error> {
        let put = self.inner.put(&self.key(name), bytes.into()).await;
        put.map(drop).map_err(|error| self.failed(name, error))
    }

    /// Puts a file of any size under a name, whatever is there.
    pub async fn upload(&self, name: &str, path: &Path) -> Result<(), Error> {
        let local = |source| Error::File { path: path.to_owned(), source };
        let theirs = |error| self.failed(name, error);
        let mut file = File::open(path).map_err(local)?;
        let size = file.metadata().map_err(local)?.len();
        if size <= PART as u64 {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map_err(local)?;
            return self.replace(name, bytes.into()).await;
        }
        let upload = self.inner.put_multipart(&self.key(name)).await.map_err(theirs)?;
        let mut parts = WriteMultipart::new_with_chunk_size(upload, PART);
        if let Err(error) = self.send(name, path, &mut file, &mut parts).await {
            // Parts that are never put together would be kept, and paid for.
            let _ = parts.abort().await;
            return Err(error);
        }
        parts.finish().await.map(drop).map_err(theirs)
    }

    async fn send(
        &self,
        name: &str,
        path: &Path,
        file: &mut File,
        parts: &mut WriteMultipart,
    ) -> Result<(), Error> {
        let local = |source| Error::File { path: path.to_owned(), source };
        let mut buffer = vec![0; PART];
        loop {
            let read = file.read(&mut buffer).map_err(local)?;
            if read == 0 {
                return Ok(());
            }
            let waited = parts.wait_for_capacity(PARTS_AT_ONCE).await;
            waited.map_err(|error| self.failed(name, error))?;
            parts.write(&buffer[..read]);
        }
    }

    /// Removes an object; one that is not there is no error.
    pub async fn delete(&self, name: &str) -> Result<(), Error> {
        match self.inner.delete(&self.key(name)).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            deleted => deleted.map_err(|error| self.failed(name, error)),
        }
    }

    fn failed(&self, name: &str, error: object_store::Error) -> Error {
        Error::of(&self.url(name), error)
    }
}

impl Object {
    fn of(name: String, meta: &ObjectMeta) -> Self {
        let modified = meta.last_modified.timestamp_millis();
        Self { name, size: meta.size, tag: meta.e_tag.clone(), modified }
    }
}
